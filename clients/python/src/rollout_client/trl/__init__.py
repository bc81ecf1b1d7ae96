"""TRL's trainers with rollout-server instead of vLLM: `from rollout_client.trl import GRPOTrainer`.

`GRPOTrainer` and `RLOOTrainer` replace TRL's, `use_rollout_server` adapts another trainer or your own, `rollout_func`
is for `GRPOTrainer(rollout_func=...)`, and `rollout_client.trl.async_grpo` supports `AsyncGRPOTrainer`. docs/trl.md
explains how to use them.
"""

from ._generation import RolloutGeneration
from ._rollout_func import rollout_func
from ._trainers import GRPOTrainer, RLOOTrainer, use_rollout_server

__all__ = ["GRPOTrainer", "RLOOTrainer", "RolloutGeneration", "rollout_func", "use_rollout_server"]
