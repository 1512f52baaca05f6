"""Why a run ran out of memory: what its log, its allocator or its card says, as account, phase, cause and rung."""
