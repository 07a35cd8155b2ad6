"""Things chosen by name: the name is a file in a folder, the options are the fields of the class in it.

In a recipe `surrogate = "dapo"` or `surrogate = {name = "dapo", high = 0.27}`; in a model
`surrogate: Annotated[Plugin, plugin("lockstep.algorithms.surrogates")]`. Adding one is adding a file.
A name with a colon is a class of your own: `task = "my_tasks/poems.py:Poems"` or `task = "my_package.poems:Poems"`.
"""

from __future__ import annotations

import difflib
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError, model_serializer

from lockstep.config.base import ConfigError, misfit
from lockstep.config.wording import in_plain_words


def choices(package: str) -> list[str]:
    """Names that can be chosen from a folder: its public modules. Folders inside it hold shared parts."""
    spec = find_spec(package)  # where it is, without running it
    assert spec is not None, package
    path = spec.submodule_search_locations
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.ispkg and not m.name.startswith("_"))


def load_class(package: str, name: str) -> type:
    """`geo_tis_band` in the folder is the class GeoTisBand (in any capitals) of geo_tis_band.py."""
    if ":" in name:
        return _load_foreign(name)
    if name not in choices(package):
        raise ConfigError(unknown(_kind(package), name, choices(package)))
    module = import_module(f"{package}.{name}")
    wanted = name.replace("_", "")
    found = [obj for key, obj in vars(module).items() if key.lower() == wanted and isinstance(obj, type)]
    if not found:
        raise ConfigError(f"{module.__file__} has no class {name.title().replace('_', '')} (in any capitals)")
    return found[0]


def name_of(cls: type) -> str:
    """What a recipe calls the class: the other way round."""
    own = cls.__module__.startswith("lockstep.")
    return cls.__module__.rpartition(".")[2] if own else f"{cls.__module__}:{cls.__name__}"


def _load_foreign(name: str) -> type:
    place, _, attribute = name.rpartition(":")
    if "=" in attribute:
        raise ConfigError(f'{name!r}: a recipe gives options as a table, {{name = "{place}", key = value}}')
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise ConfigError(
            f"cannot load {name!r}: there is no file {path.absolute()} (paths begin where the command runs)"
        )
    _find_neighbours(path.resolve().parent if path.suffix == ".py" else Path.cwd())
    try:
        module = _load_file(path) if path.suffix == ".py" else import_module(place)
        found = getattr(module, attribute)
    except Exception as error:  # the file is the user's: whatever it raises is theirs to read
        raise ConfigError(f"cannot load {name!r}: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"cannot load {name!r}: {attribute} is not a class")
    return found


def _find_neighbours(folder: Path) -> None:
    """What a user's file imports may lie beside it. Last, so that no neighbour can take a library's name."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_file(path: Path) -> ModuleType:
    """The module of a file, run once. It goes by its path, so that no file can take a library's name."""
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _kind(package: str) -> str:
    """What one of its files is: a surrogate."""
    return package.rpartition(".")[2].rstrip("s")


def unknown(kind: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}choices: {', '.join(known)}"


class Plugin(BaseModel):
    """A chosen file and the options given for it."""

    model_config = ConfigDict(frozen=True)
    package: str
    name: str
    options: Mapping[str, Any] = {}

    def build(self, **extra: Any) -> Any:
        """An instance; `extra` are arguments the owner supplies rather than the recipe."""
        try:
            return load_class(self.package, self.name)(**self.options, **extra)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    @model_serializer
    def _as_written(self) -> str | dict[str, Any]:
        """As a recipe would say it."""
        return {"name": self.name, **self.options} if self.options else self.name

    @property
    def cls(self) -> type:
        return load_class(self.package, self.name)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Reads a name, or a table with `name`, as a plugin of `package`; with `several`, a list of them too.

    `nothing` is a name for none of them, where the field may be None.
    """

    package: str
    several: bool = False
    nothing: str | None = None

    def __call__(self, value: object) -> Plugin | tuple[Plugin, ...] | None:
        if self.several and isinstance(value, list | tuple):
            return tuple(map(self._read, value))
        return None if value in (None, self.nothing) else self._read(value)

    @property
    def names(self) -> list[str]:
        return [*([self.nothing] if self.nothing else []), *choices(self.package)]

    def _read(self, value: object) -> Plugin:
        if isinstance(value, Plugin):
            return value
        table = {"name": value} if isinstance(value, str) else value
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            raise ConfigError(f"expected a name or a table with `name`; choices: {', '.join(self.names)}")
        name, options = table["name"], {k: v for k, v in table.items() if k != "name"}
        if ":" not in name and name not in choices(self.package):
            raise ConfigError(unknown(_kind(self.package), name, self.names))
        return Plugin(package=self.package, name=name, options=_check(load_class(self.package, name), name, options))


def plugin(package: str, several: bool = False, nothing: str | None = None) -> BeforeValidator:
    """Validator for a field of type Plugin (with `several`: or a tuple of them) that picks from `package`."""
    return BeforeValidator(Chooser(package, several, nothing))


def _check(cls: type, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as the types of their fields. Fields are those of a dataclass; any other class takes no options."""
    known = [field.name for field in fields(cls)] if is_dataclass(cls) else []
    for key in options:
        if key not in known:
            raise ConfigError(
                unknown(f"option of {name}", key, known) if known else f"{name} has no options, not {key!r}"
            )
    if not known:
        return options
    try:
        made = TypeAdapter(cls).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([name, *map(str, first["loc"])])
        given = f" (got {first['input']!r})" if first["loc"] else ""
        raise ConfigError(f"{place}: {in_plain_words(first)}{given}") from None
    values = {key: getattr(made, key) for key in options}
    for key, value in values.items():
        if problem := misfit(value):
            raise ConfigError(f"{name}.{key}: {problem} (got {options[key]!r})")
    return values
