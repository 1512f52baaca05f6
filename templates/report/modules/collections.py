"""The part of the standard library's collections that the ledger and the clock use, for a page."""


class defaultdict(dict):  # noqa: N801
    """A dictionary that makes what it lacks."""

    def __init__(self, default_factory=None, *content):
        dict.__init__(self, *content)
        self.default_factory = default_factory

    @classmethod
    def __class_getitem__(cls, _kinds):
        return cls

    def __getitem__(self, key):
        if key not in self:
            self[key] = self.default_factory()
        return dict.__getitem__(self, key)


class Counter(dict):
    """A dictionary of counts; what it lacks counts 0."""

    def __init__(self, items=()):
        dict.__init__(self)
        self.update(items)

    @classmethod
    def __class_getitem__(cls, _kinds):
        return cls

    def __getitem__(self, key):
        return self.get(key, 0)

    def update(self, items):
        """Adds counts of a dictionary, or one for each item."""
        pairs = items.items() if isinstance(items, dict) else [(item, 1) for item in items]
        for key, count in pairs:
            self[key] = self[key] + count

    def total(self):
        """Returns the sum of all counts."""
        return sum(self.values())
