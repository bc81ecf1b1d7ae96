"""TRL's trainers on a rollout-server: `from rollout_client.trl import GRPOTrainer` in place of TRL's, without vLLM.

`GRPOTrainer` and `RLOOTrainer` take the place of TRL's, `use_rollout_server` does the same with another trainer or one
of your own, `rollout_func` is for `GRPOTrainer(rollout_func=...)`, and `rollout_client.trl.async_grpo` has what
`AsyncGRPOTrainer` needs. docs/trl.md says how to use them.
"""

from ._generation import RolloutGeneration
from ._rollout_func import rollout_func
from ._trainers import GRPOTrainer, RLOOTrainer, use_rollout_server

__all__ = ["GRPOTrainer", "RLOOTrainer", "RolloutGeneration", "rollout_func", "use_rollout_server"]
