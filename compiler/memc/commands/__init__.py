"""Commands that live in modules of their own and are imported when they are asked for.

Each module holds a click command called `command`. The name on the command line is the module's name.
"""

from __future__ import annotations

NAMES: tuple[str, ...] = ("check", "completion", "diagnose", "diff", "hardware", "init", "schema", "solve", "trace")
