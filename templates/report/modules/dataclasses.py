"""The part of the standard library's dataclasses that memc's records use, small enough to travel inside a page."""

MISSING = object()


class Field:
    """One field of a record: its name and what it is when nobody says."""

    def __init__(self, default, default_factory):
        self.name = ""
        self.default = default
        self.default_factory = default_factory


def field(*, default=MISSING, default_factory=MISSING):
    """Returns the description of one field."""
    return Field(default, default_factory)


def dataclass(cls=None, **_options):
    """Returns `cls` with a constructor, equality and a hash over its annotated fields, or a decorator that does it."""
    if cls is None:
        return _decorated
    return _decorated(cls)


def _decorated(cls):
    found = {}
    for name in cls.__annotations__:
        default = cls.__dict__.get(name, MISSING)
        own = default if isinstance(default, Field) else Field(default, MISSING)
        own.name = name
        found[name] = own
    names = tuple(found)

    def construct(self, *args, **given):
        given.update(zip(names, args, strict=False))
        for name, own in found.items():
            if name in given:
                value = given.pop(name)
            elif own.default_factory is not MISSING:
                value = own.default_factory()
            elif own.default is not MISSING:
                value = own.default
            else:
                raise TypeError("missing argument: " + name)
            setattr(self, name, value)
        if given:
            raise TypeError("unexpected arguments: " + ", ".join(given))

    def _values(self):
        return tuple(getattr(self, name) for name in names)

    cls.__dataclass_fields__ = found
    cls.__init__ = construct
    cls.__eq__ = lambda self, other: type(self) is type(other) and _values(self) == _values(other)
    cls.__hash__ = lambda self: hash(_values(self))
    return cls


def fields(record):
    """Returns the fields of a record or of its class, in order."""
    return tuple(record.__dataclass_fields__.values())


def replace(record, **changes):
    """Returns a copy of a record with other values."""
    values = {name: getattr(record, name) for name in record.__dataclass_fields__}
    values.update(changes)
    return type(record)(**values)
