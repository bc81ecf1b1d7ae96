"""TRL's own GRPOTrainer, unmodified, on text and on images. It pushes by vLLM's weight transfer: torch's own store, a
group by NCCL, packed broadcasts. The GPUs of both sides are emulated: `make cuda-test-trainers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import EXACT, STEPS

from models import write_vision_model
from rollout_client import ServerProcess
from rollout_client.process import free_port
from serving import SMALL_CACHE

SERVER, EMULATOR = os.environ.get("ROLLOUT_CUDA_SERVER"), os.environ.get("EMULATOR")
HERE = Path(__file__).parent
PATIENCE_SECONDS = 540
"""For a run with an emulated GPU; a longer one is a hang."""

pytestmark = pytest.mark.skipif(not SERVER or not EMULATOR, reason="make cuda-test-trainers")


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_5_vl", "internvl3"])
def test_grpo_unmodified(model, tmp_path, architecture, kind):
    data, flags = "text", [*SMALL_CACHE, "--device", "cuda", "--dtype", "float32"]
    if architecture != "qwen2":
        data, model = "images", str(write_vision_model(tmp_path / "model", architecture))
        flags += ["--limit-mm-per-prompt", "image=2"]
    prefix = ("env", f"LD_LIBRARY_PATH={EMULATOR}")
    with ServerProcess(SERVER, model, flags, prefix=prefix) as server:
        http = server.http_address.rpartition(":")[2]
        arguments = [http, str(free_port()), model, str(tmp_path / "outputs"), data, kind]
        run = subprocess.run(
            [sys.executable, str(HERE / "broadcast_run.py"), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        said = json.loads(run.stdout.splitlines()[-1])
        assert len(said["differences"]) == STEPS and max(said["differences"]) < EXACT, said["differences"]
        assert min(said["grad_norm"]) > 0
        # Each step's policy, and the last one once more.
        assert server.client.status().weight_version == STEPS + 1
        assert server.client.checksum() == said["checksums"]
