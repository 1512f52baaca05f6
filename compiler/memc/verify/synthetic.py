"""A model without its weights: the folder in which the script finds a config by the model's name."""

from __future__ import annotations

import json
from pathlib import Path

from memc.facts import load_model_config
from memc.verify.lock import Promise


def model_folder(promise: Promise, scratch: Path) -> Path | None:
    """Returns the folder to start the launcher in, where the plan's model is found by its name; None: the current one.

    A config is all that a run with random weights reads of a model. One that lies here under the model's name is taken
    as it is; otherwise the catalogue's is written below `scratch`.

    Raises:
        MemcError: When the catalogue does not know the model either.
    """
    if not promise.model or Path(promise.model).exists():
        return None
    place = scratch / "models" / promise.model
    config = load_model_config(promise.model_key, base_dir=Path())
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return scratch / "models"
