"""The part of the standard library's enum that memc uses, small enough to travel inside a page."""


class EnumType(type):
    """Makes one instance of each member; iteration is in the order of definition."""

    def __new__(mcs, name, bases, namespace):
        """Returns the class; its members are its public plain attributes."""
        named = {key: value for key, value in namespace.items() if _is_member(key, value)}
        rest = {key: value for key, value in namespace.items() if key not in named}
        cls = type.__new__(mcs, name, bases, rest)
        cls._members = {}
        for key, value in named.items():
            member = cls._base.__new__(cls, value)
            member.name = key
            member.value = value
            setattr(cls, key, member)
            cls._members[value] = member
        return cls

    def __iter__(cls):
        return iter(cls._members.values())

    def __len__(cls):
        return len(cls._members)

    def __call__(cls, value):
        """Returns the member of a value."""
        return cls._members[value]


def _is_member(key, value):
    return not key.startswith("_") and isinstance(value, (str, int))


class Enum(metaclass=EnumType):
    """Base of all enums."""

    _base = object


class StrEnum(str, Enum):  # noqa: UP042
    """Members that are strings."""

    _base = str

    def __str__(self):
        return self.value

    def __format__(self, spec):
        return format(self.value, spec)

    def __repr__(self):
        return repr(self.value)

    def __hash__(self):
        return hash(self.value)

    def __eq__(self, other):
        return self is other or (not isinstance(other, StrEnum) and self.value == other)


class IntEnum(int, Enum):
    """Members that are integers."""

    _base = int
