"""TOML recipes into validated models: `load` a recipe, `Config` to declare one, `Plugin` to name a file."""

from lockstep.config.base import Config, ConfigError
from lockstep.config.loading import load, resolve
from lockstep.config.plugins import Plugin, choices, plugin

__all__ = ["Config", "ConfigError", "Plugin", "choices", "load", "plugin", "resolve"]
