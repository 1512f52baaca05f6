# ruff: noqa: E501  (messages stand as they are printed)
"""Logs in the wordings that torch and the programs around it print, each with what is to be said about it."""

from __future__ import annotations

from typing import NamedTuple

from memc.diagnose import Cause
from memc.ledger.entries import Account, Phase


class Log(NamedTuple):
    text: str
    kind: str
    cause: Cause
    account: Account | None
    phase: Phase | None
    figures: dict[str, int] = {}  # noqa: RUF012  (never changed)


MIB, GIB = 2**20, 2**30
HINT_2 = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
HINT_1 = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
HINT_29 = HINT_2.replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
FORWARD = """\
  0%|          | 0/1875 [00:00<?, ?it/s]
Traceback (most recent call last):
  File "/w/train.py", line 210, in <module>
    main()
  File "/v/transformers/trainer.py", line 3749, in training_step
    loss = self.compute_loss(model, inputs)
  File "/v/torch/nn/modules/module.py", line 1747, in _call_impl
    return forward_call(*args, **kwargs)
  File "/v/transformers/models/qwen2/modeling_qwen2.py", line 46, in forward
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
"""
LATER_FORWARD = FORWARD.replace(
    "0%|          | 0/1875 [00:00<?, ?it/s]", " 22%|██▏       | 413/1875 [12:01<41:10,  1.7s/it]"
)
LOGITS = (
    FORWARD
    + """\
  File "/v/transformers/models/qwen2/modeling_qwen2.py", line 480, in forward
    logits = self.lm_head(hidden_states[:, slice_indices, :])
"""
)
STEP = """\
  0%|          | 0/1875 [00:03<?, ?it/s]
Traceback (most recent call last):
  File "/v/transformers/trainer.py", line 2581, in _inner_training_loop
    self.optimizer.step()
  File "/v/torch/optim/adamw.py", line 220, in step
    has_complex = self._init_group(
  File "/v/torch/optim/adamw.py", line 160, in _init_group
    state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
"""
BACKWARD = """\
Traceback (most recent call last):
  File "/v/accelerate/accelerator.py", line 2454, in backward
    loss.backward(**kwargs)
  File "/v/torch/_tensor.py", line 626, in backward
    torch.autograd.backward(
  File "/v/torch/autograd/__init__.py", line 347, in backward
    _engine_run_backward(
"""
EVALUATE = """\
100%|██████████| 625/625 [20:00<00:00,  1.9s/it]
Traceback (most recent call last):
  File "/v/transformers/trainer.py", line 4149, in evaluate
    output = eval_loop(
  File "/v/transformers/trainer.py", line 4400, in evaluation_loop
    all_preds = nested_concat(all_preds, logits, padding_index=-100)
"""
LOAD = """\
Loading checkpoint shards:  75%|███████▌  | 3/4 [00:09<00:03,  3.0s/it]
Traceback (most recent call last):
  File "/v/transformers/modeling_utils.py", line 4900, in from_pretrained
    ) = cls._load_pretrained_model(
  File "/v/transformers/core_model_loading.py", line 1217, in _materialize_copy
    tensor = tensor.to(device=device, dtype=dtype)
"""
DEEPSPEED = """\
Traceback (most recent call last):
  File "/v/deepspeed/__init__.py", line 203, in initialize
    engine = DeepSpeedEngine(args=args,
  File "/v/deepspeed/runtime/engine.py", line 1400, in _configure_zero_optimizer
    optimizer = DeepSpeedZeroOptimizer(
  File "/v/deepspeed/runtime/zero/stage_1_and_2.py", line 702, in initialize_optimizer_states
    single_grad_partition = torch.zeros(
"""
SAVE = """\
Traceback (most recent call last):
  File "/v/deepspeed/runtime/engine.py", line 3700, in save_16bit_model
    state_dict = self._zero3_consolidated_16bit_state_dict()
"""
OOM_13 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 10.76 GiB total capacity; 9.55 GiB already "
    "allocated; 15.44 MiB free; 240.15 MiB cached)\n"
)
OOM_17 = (
    "RuntimeError: CUDA out of memory. Tried to allocate 194.00 MiB (GPU 0; 3.82 GiB total capacity; 3.15 GiB already "
    "allocated; 9.88 MiB free; 3.22 GiB reserved in total by PyTorch)\n"
)
OOM_113 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.52 GiB (GPU 0; 23.56 GiB total capacity; 7.50 "
    f"GiB already allocated; 8.32 GiB free; 13.88 GiB reserved in total by PyTorch){HINT_1}\n"
)
OOM_21 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 316.00 MiB. GPU 5 has a total capacty of 23.69 "
    "GiB of which 5.69 MiB is free. Including non-PyTorch memory, this process has 23.68 GiB memory in use. Of the "
    "allocated memory 22.72 GiB is allocated by PyTorch, and 67.06 MiB is reserved by PyTorch but unallocated."
    f"{HINT_2}\n"
)
OOM_25 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.33 GiB of "
    "which 508.44 MiB is free. Including non-PyTorch memory, this process has 78.80 GiB memory in use. Of the allocated "
    "memory 77.24 GiB is allocated by PyTorch, with 57.88 MiB allocated in private pools (e.g., CUDA Graphs), and "
    f"185.89 MiB is reserved by PyTorch but unallocated.{HINT_2}\n"
)
OOM_213 = OOM_25.replace(HINT_2, HINT_29)
OOM_OTHERS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 31.36 GiB of "
    "which 471.69 MiB is free. Process 19239 has 14.26 GiB memory in use. Including non-PyTorch memory, this process has "
    "16.63 GiB memory in use. Of the allocated memory 15.03 GiB is allocated by PyTorch, and 1.00 GiB is reserved by "
    f"PyTorch but unallocated.{HINT_2}\n"
)
OOM_CONTAINER = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 888.00 MiB. GPU 0 has a total capacity of 94.97 GiB of "
    "which 79.56 MiB is free. Process 1 has 94.50 GiB memory in use. Of the allocated memory 93.16 GiB is allocated by "
    f"PyTorch, and 663.00 MiB is reserved by PyTorch but unallocated.{HINT_2}\n"
)
OOM_FRAGMENTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.15 GiB. GPU 0 has a total capacity of 39.56 GiB of "
    "which 0.80 GiB is free. Including non-PyTorch memory, this process has 38.61 GiB memory in use. Of the allocated "
    f"memory 33.66 GiB is allocated by PyTorch, and 4.11 GiB is reserved by PyTorch but unallocated.{HINT_2}\n"
)
OOM_LARGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 19.68 GiB. GPU 0 has a total capacity of 23.68 GiB of "
    "which 11.88 GiB is free. Including non-PyTorch memory, this process has 11.79 GiB memory in use. Of the allocated "
    f"memory 11.44 GiB is allocated by PyTorch, and 43.59 MiB is reserved by PyTorch but unallocated.{HINT_2}\n"
)
OOM_LIMIT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.33 GiB of "
    "which 60.00 GiB is free. Including non-PyTorch memory, this process has 19.30 GiB memory in use. 19.83 GiB allowed; "
    f"Of the allocated memory 18.70 GiB is allocated by PyTorch, and 85.89 MiB is reserved by PyTorch but unallocated."
    f"{HINT_2}\n"
)
SUMMARY = """\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 0                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 2         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |  21842 MiB |  22911 MiB |   1840 GiB |   1819 GiB |
|       from large pool |  21790 MiB |  22858 MiB |   1835 GiB |   1814 GiB |
|---------------------------------------------------------------------------|
| Active memory         |  21842 MiB |  22911 MiB |   1840 GiB |   1819 GiB |
|---------------------------------------------------------------------------|
| GPU reserved memory   |  23010 MiB |  23010 MiB |     91 GiB |     68 GiB |
|---------------------------------------------------------------------------|
| Non-releasable memory |   1167 MiB |   3288 MiB |    921 GiB |    920 GiB |
|===========================================================================|
"""
SMI = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.86.15              Driver Version: 570.86.15      CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   38C    P0             92W /  400W |   79123MiB /  81920MiB |     97%      Default |
+-----------------------------------------+------------------------+----------------------+
| Processes:                                                                              |
|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A          412983      C   python                                40120MiB |
|    0   N/A  N/A          518220      C   /opt/conda/bin/python3                38984MiB |
+-----------------------------------------------------------------------------------------+
"""
T, A, P = "torch-out-of-memory", Account, Phase
LOGS: dict[str, Log] = {
    "torch 1.3, cached": Log(
        OOM_13,
        T,
        Cause.STATIC,
        A.PARAMETERS,
        None,
        {"tried": 20 * MIB, "capacity": int(10.76 * GIB), "unallocated": int(240.15 * MIB)},
    ),
    "torch 1.7, first forward": Log(
        FORWARD + OOM_17, T, Cause.ACTIVATIONS, A.ACTIVATIONS, P.FORWARD, {"free": int(9.88 * MIB)}
    ),
    "torch 1.13, fragments": Log(
        FORWARD + OOM_113,
        T,
        Cause.FRAGMENTATION,
        A.WORKSPACE,
        P.FORWARD,
        {"unallocated": int(13.88 * GIB) - int(7.5 * GIB)},
    ),
    "torch 2.1, optimizer": Log(
        STEP + OOM_21, T, Cause.FIRST_STEP, A.OPTIMIZER_STATES, P.STEP, {"capacity": int(23.69 * GIB)}
    ),
    "torch 2.5, logits": Log(
        LOGITS + OOM_25, T, Cause.LOGITS, A.ACTIVATIONS, P.LOSS, {"private_pools": int(57.88 * MIB)}
    ),
    "torch 2.13, backward": Log(BACKWARD + OOM_213, T, Cause.BACKWARD, A.ACTIVATIONS, P.BACKWARD),
    "later forward": Log(LATER_FORWARD + OOM_25, T, Cause.GROWTH, A.ACTIVATIONS, P.FORWARD),
    "another process": Log(
        FORWARD + OOM_OTHERS, T, Cause.OTHER_PROCESS, None, P.FORWARD, {"other_processes": int(14.26 * GIB)}
    ),
    "own process in a container": Log(
        LOGITS + OOM_CONTAINER, T, Cause.LOGITS, A.ACTIVATIONS, P.LOSS, {"other_processes": 0}
    ),
    "fragments": Log(FORWARD + OOM_FRAGMENTED, T, Cause.FRAGMENTATION, A.WORKSPACE, P.FORWARD),
    "one long sample": Log(FORWARD + OOM_LARGE, T, Cause.LONG_SAMPLE, A.ACTIVATIONS, P.FORWARD),
    "a limit": Log(FORWARD + OOM_LIMIT, T, Cause.ALLOCATOR_LIMIT, None, P.FORWARD),
    "evaluation": Log(EVALUATE + OOM_25, T, Cause.EVALUATION, A.ACTIVATIONS, P.EVALUATE),
    "load": Log(LOAD + OOM_25, T, Cause.STATIC, A.PARAMETERS, P.LOAD),
    "DeepSpeed's start": Log(DEEPSPEED + OOM_25, T, Cause.MASTERS, A.MASTER_WEIGHTS, P.LOAD),
    "save under ZeRO-3": Log(SAVE + OOM_25, T, Cause.GATHER, A.PARAMETERS, P.SAVE),
    "AMD": Log(FORWARD + OOM_25.replace("CUDA out", "HIP out"), T, Cause.ACTIVATIONS, A.ACTIVATIONS, P.FORWARD),
    "a context": Log(
        "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported\n",
        T,
        Cause.CONTEXT,
        A.WORKSPACE,
        None,
    ),
    "the kernel's killer": Log(
        "[ 5301.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)\n"
        "[ 5301.2] Memory cgroup out of memory: Killed process 4127 (python) total-vm:98304kB\n",
        "host-out-of-memory",
        Cause.HOST,
        None,
        None,
    ),
    "Killed": Log("step 12 loss 1.9\nKilled\n", "process-killed", Cause.HOST, None, None),
    "bash's Killed": Log(
        "launch.sh: line 12:  4127 Killed   python train.py\n", "process-killed", Cause.HOST, None, None
    ),
    "torchrun": Log(
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n  exitcode  : -9 (pid: 4127)\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 4127\n",
        "process-killed",
        Cause.HOST,
        None,
        None,
    ),
    "DeepSpeed's launcher": Log(
        "[2026-02-02 10:00:00,000] [ERROR] [launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code "
        "= -9\n",
        "process-killed",
        Cause.HOST,
        None,
        None,
    ),
    "host allocator": Log(
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)\n",
        "host-allocation-failed",
        Cause.HOST,
        None,
        None,
    ),
    "shared memory": Log(
        "RuntimeError: DataLoader worker (pid 88) is killed by signal: Bus error. It is possible that dataloader's workers "
        "are out of shared memory. Please try to raise your shared memory limit.\nERROR: Unexpected bus error encountered "
        "in worker. This might be caused by insufficient shared memory (shm).\n",
        "shared-memory",
        Cause.SHARED_MEMORY,
        None,
        None,
    ),
    "NCCL": Log(
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\n"
        "node7:88:412 [0] transport/p2p.cc:254 NCCL WARN Cuda failure 2 'out of memory'\n",
        "nccl-out-of-memory",
        Cause.BUCKETS,
        A.WORKSPACE,
        None,
    ),
    "cuBLAS": Log(
        FORWARD + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
        "cublas-out-of-memory",
        Cause.LIBRARY,
        A.WORKSPACE,
        P.FORWARD,
    ),
    "bitsandbytes": Log(
        "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp\n",
        "bitsandbytes-out-of-memory",
        Cause.STATIC,
        A.PARAMETERS,
        P.LOAD,
    ),
    "a summary": Log(
        SUMMARY, "memory-summary", Cause.ACTIVATIONS, A.ACTIVATIONS, None, {"allocated_peak": 22911 * MIB}
    ),
    "a fragmented summary": Log(
        SUMMARY.replace("|   1167 MiB |", "|   9167 MiB |"), "memory-summary", Cause.FRAGMENTATION, A.WORKSPACE, None
    ),
    "a calm summary": Log(
        SUMMARY.replace("OOMs: 1", "OOMs: 0").replace("retries: 2", "retries: 0"),
        "memory-summary",
        Cause.IN_USE,
        None,
        None,
    ),
    "nvidia-smi, two processes": Log(
        SMI, "nvidia-smi", Cause.OTHER_PROCESS, A.WORKSPACE, None, {"gpu_0_used": 79123 * MIB}
    ),
    "nvidia-smi, one process": Log(
        "\n".join(line for line in SMI.splitlines() if "518220" not in line).replace("79123MiB", "40620MiB"),
        "nvidia-smi",
        Cause.IN_USE,
        None,
        None,
    ),
    "nvidia-smi, a hidden process": Log(
        "\n".join(line for line in SMI.splitlines() if "518220" not in line),
        "nvidia-smi",
        Cause.OTHER_PROCESS,
        A.WORKSPACE,
        None,
    ),
    "nvidia-smi, CSV of cards": Log(
        "index, name, memory.used [MiB], memory.total [MiB]\n0, NVIDIA A100, 79123 MiB, 81920 MiB\n1, NVIDIA A100, 4 MiB, "
        "81920 MiB\n",
        "nvidia-smi",
        Cause.IN_USE,
        None,
        None,
        {"gpu_0_used": 79123 * MIB, "gpu_1_total": 81920 * MIB},
    ),
    "nvidia-smi, CSV of processes": Log(
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 11, python, 40120 MiB\nGPU-1, 12, python, 30000 MiB\n",
        "nvidia-smi",
        Cause.OTHER_PROCESS,
        A.WORKSPACE,
        None,
    ),
}
