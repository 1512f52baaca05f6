"""Live bytes of a step under FSDP2 as accelerate sets it up, on the CPU, with the other ranks a fake process group.

Run as: python fsdp_live.py RANKS METHOD RESHARD; prints one JSON object: the largest live bytes of each stage of the
second step. Collectives do nothing, but every buffer for them is made and freed as on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from typing import Any

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
TOKENS = 8


class Live(TorchDispatchMode):
    """Knows every storage that is alive, by the size it has now: FSDP empties storages without freeing them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.stage = "load"
        self.peaks: dict[str, int] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Follows the storage of a tensor, or of this rank's shard of one."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        known = self.alive.get(storage._cdata)
        if known is None or known() is None:
            self.alive[storage._cdata] = weakref.ref(storage)

    def total(self) -> int:
        """Returns the live bytes."""
        found = [(key, reference()) for key, reference in self.alive.items()]
        self.alive = {key: self.alive[key] for key, storage in found if storage is not None}
        return sum(storage.nbytes() for _, storage in found if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, then sees what it returned and how much is alive."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), self.total())
        return out


def prepared(ranks: int, method: str, reshard: str) -> tuple[Any, Any, Any]:
    """Returns accelerator, model and optimizer, sharded over `ranks`."""
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_RESHARD_AFTER_FORWARD": reshard,
        "FSDP_OFFLOAD_PARAMS": "false",
    }
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaConfig, LlamaForCausalLM

    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator()
    model: Any = LlamaForCausalLM(LlamaConfig(**MODEL, use_cache=False))
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=16, target_modules="all-linear"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, fused=True))
    return accelerator, model, optimizer


def main() -> None:
    """Prints the largest live bytes of each stage of the second step."""
    ranks, method, reshard = sys.argv[1:]
    live = Live()
    with live:
        accelerator, model, optimizer = prepared(int(ranks), method, reshard)
        for parameter in model.parameters():
            live.see(parameter)
        ids = torch.zeros((1, TOKENS), dtype=torch.long)
        for number in range(2):
            live.stage = f"forward{number}"
            loss = model(input_ids=ids, labels=ids).loss
            live.stage = f"backward{number}"
            accelerator.backward(loss)
            live.stage = f"step{number}"
            optimizer.step()
            live.stage = "between"
            optimizer.zero_grad()
            del loss
    print(json.dumps({stage: live.peaks[f"{stage}1"] for stage in ("forward", "backward", "step")}))


if __name__ == "__main__":
    main()
