"""Lockstep: reinforcement-learning post-training in which the sampler and the learner stay in lockstep."""

__version__ = "0.1.0"
