"""Tasks by name: a dataset, or a generator, with its reward. `DatasetTask` is the base for tasks of your own."""

from lockstep.tasks._dataset import DatasetTask
from lockstep.tasks.judging import Part, combine

__all__ = ["DatasetTask", "Part", "combine"]
