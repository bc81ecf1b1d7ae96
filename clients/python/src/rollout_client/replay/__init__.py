"""Records samples as receipts, and replays them bit for bit: why did this sample look like that?

```python
with Recorder(client, "samples.jsonl") as recorder:
    outputs = recorder.generate(prompts, n=8, sampling=SamplingParams(max_tokens=256))  # like client.generate
```

A receipt is a line of JSON with everything that determined one sample: prompt tokens, parameters, seed, versions and
digests of the weights, the server, and the sample itself, bit for bit. `replay` generates the samples again and
compares.
"""

from ._receipt import Receipt, SpanReceipt, parse_receipt, read_receipts
from ._recorder import Recorder, RecordingClient, weights_digest
from ._run import Replayed, Report, Verdict, replay

__all__ = [
    "Receipt",
    "Recorder",
    "RecordingClient",
    "Replayed",
    "Report",
    "SpanReceipt",
    "Verdict",
    "parse_receipt",
    "read_receipts",
    "replay",
    "weights_digest",
]
