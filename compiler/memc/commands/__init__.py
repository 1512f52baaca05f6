"""Commands that live in modules of their own and are imported when they are asked for.

Each module holds a click command called `command`. The name on the command line is the module's name.
"""

from __future__ import annotations

NAMES: dict[str, str] = {
    "calibrate": "Collect what runs measured, at or below PATHS, into figures that later plans on those cards use.",
    "check": "Compare every folder that memc wrote, at or below PATHS, with what its spec yields now.",
    "completion": "Print the completion script of SHELL.",
    "diagnose": "Say why a run ran out of memory: account, phase, likely cause, evidence, next rung.",
    "diff": "Show which ledger lines move from BEFORE to AFTER, which settings change and "
    "whether that touches numerics.",
    "hardware": "Price SPEC on every card of the catalogue, and say what an upgrade from its own card is worth.",
    "init": "Write a commented spec to FILE (default: spec.yaml).",
    "probe": "Measure what this machine achieves: products by shape and type, memory, PCIe, all-reduce, optimizers, "
    "the drive.",
    "rehearse": "Run the script in FOLDER on phantom cards and compare what torch's allocator counts with the ledger.",
    "schema": "Print the JSON schema of a spec.",
    "solve": "Find the longest sequence, the largest micro-batch or model, the cheapest card or the "
    "fewest cards for SPEC.",
    "trace": "Trace the plan of SPEC (a spec file or a folder that memc wrote) beside its ledger; no GPU is needed.",
    "verify": "Run the script in FOLDER for a few steps with the longest batch and compare with the ledger.",
}
"""Each command with the first sentence of its help, which listing them takes."""
