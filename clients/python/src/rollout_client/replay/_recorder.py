"""Writes receipts while a trainer samples."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from .. import _convert_weights, _proto
from ..client import RolloutClient
from ..errors import FailedPrecondition, InvalidArgument
from ..images import ImageInput
from ..routing import join_routing
from ..types import PromptInput, PromptOutput, Sample, SamplingInput, SamplingParams
from ._images import ImageDirectory, exact_images
from ._receipt import Receipt, SpanReceipt

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import GenerateOptions

# The facts that affect bits, and that help a reader. docs/numerics.md says which of them may differ.
_FACTS = (
    "server_version",
    "model",
    "architecture",
    "parameters",
    "dtype",
    "device",
    "kernel",
    "tensor_parallel_size",
)


class Recorder:
    """Appends a receipt for every sample to a file. A context manager; threads may share it."""

    def __init__(
        self,
        client: RolloutClient,
        path: str | os.PathLike[str],
        *,
        digests: bool = True,
        images: str | os.PathLike[str] | None = None,
    ) -> None:
        """Opens the file.

        Args:
            client: a client of the server that samples, from which the recorder gets versions and digests.
            path: the file, which is created or appended to.
            digests: request the checksums of the weights once for each new version, which needs a token with the role
                `control`. The server reads all its weights for it, in pieces between steps. Without digests, receipts
                have only version numbers, which have no meaning after a restart.
            images: a directory in which the pixels of the prompts' images are kept, as PNG files named by their
                digests. Without it receipts have only the digests, and samples with images cannot be replayed.
        """
        self.note: Any = None
        """The default note of receipts; it may be changed at any time."""
        self._client, self._digests = client, digests
        self._images = None if images is None else ImageDirectory(images)
        self._lock = threading.Lock()
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 closed by close()
        if _ends_in_a_line(self._file):
            self._file.write("\n")  # a process was killed while it wrote: start a new line
        self._process = 0
        self._facts: dict[str, Any] = {}
        # By version: the number of pushes when it was learned, and the digest.
        self._weights: dict[int, tuple[int, str]] = {}

    def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        *,
        note: Any = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """Calls `RolloutClient.generate` and adds the receipts; `note` as for `add`."""
        return self._recorded(partial(self._client.generate, prompts, n, sampling), sampling, options, note)

    def look(self) -> None:
        """Gets the digest of the serving weights before a request during which others may be pushed."""
        with self._lock:
            self._look()

    def add(
        self,
        outputs: Sequence[PromptOutput],
        sampling: SamplingInput = None,
        *,
        adapter: str | None = None,
        images: Sequence[Sequence[ImageInput] | None] = (),
        note: Any = None,
    ) -> None:
        """Adds receipts of samples. Call it before the next push: the digest is that of the weights which serve now.

        Args:
            outputs: the result of one call of `generate`.
            sampling, adapter: the arguments of that call.
            images: those of that call, which a recorder with a directory of images keeps.
            note: JSON value for each receipt, such as the trainer's step; None takes the recorder's note.

        Raises:
            InvalidArgument: the note is not JSON, or an image that the recorder keeps is missing, is a file, or is not
                the one that the model saw.
        """
        if self._images is not None:
            self._images.keep(outputs, images)
        lines = [f"{receipt.to_json()}\n" for receipt in self.receipts(outputs, sampling, adapter=adapter, note=note)]
        with self._lock:
            self._file.writelines(lines)
            self._file.flush()

    def receipts(
        self,
        outputs: Sequence[PromptOutput],
        sampling: SamplingInput = None,
        *,
        adapter: str | None = None,
        note: Any = None,
    ) -> list[Receipt]:
        """The receipts that `add` would write."""
        with self._lock:
            self._look()
            server, weights = self._facts, {version: digest for version, (_, digest) in self._weights.items()}
        generation = None if adapter is None else self._generation(adapter)
        single = None if isinstance(sampling, Sequence) else sampling or SamplingParams()

        def receipt(output: PromptOutput, sample: Sample) -> Receipt:
            params = sampling[output.prompt_index] if single is None else single
            return Receipt(
                server=server,
                prompt_index=output.prompt_index,
                sample_index=sample.sample_index,
                prompt_token_ids=output.prompt_token_ids,
                images=output.images,
                sampling=replace(params, seed=sample.seed),
                adapter=adapter,
                adapter_generation=generation,
                spans=[SpanReceipt(**vars(s), weights=weights.get(s.weight_version)) for s in sample.weight_versions],
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
                raw_logprobs=sample.raw_logprobs,
                routing=routing_hash(output, sample),
                finish_reason=sample.finish_reason,
                note=self.note if note is None else note,
            )

        return [receipt(output, sample) for output in outputs for sample in output.samples]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Recorder:
        """The recorder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        self.close()

    def _recorded(
        self,
        generate: Callable[..., list[PromptOutput]],
        sampling: SamplingInput,
        options: GenerateOptions,
        note: Any,
    ) -> list[PromptOutput]:
        """Calls `generate` with the options and adds the receipts."""
        if options.get("routing"):
            raise InvalidArgument(
                "routing: receipts have no experts to give to a prompt, so its samples could not be replayed; leave it "
                "out, or call the client without the recorder"
            )
        if self._images is not None:  # reject files before anything is sampled
            options["images"] = exact_images(options.get("images", ()))
        self.look()
        outputs = generate(**options)
        self.add(outputs, sampling, adapter=options.get("adapter"), images=options.get("images", ()), note=note)
        return outputs

    def _look(self) -> None:
        """Gets the digest of the serving weights, and drops facts about an earlier server process."""
        started = self._client.timeline(max_spans=1).started
        if started != self._process:
            self._process, self._weights = started, {}
            self._facts = server_facts(self._client)
        if not self._digests:
            return
        status = self._client.status()
        known = self._weights.get(status.weight_version)
        if known is None or known[0] != status.updates:
            try:
                version, digest = weights_digest(self._client)
            except FailedPrecondition:
                return  # the weights sleep, so earlier samples get no digest
            # After a push in between, the digest may belong to either policy.
            if self._client.status().updates == status.updates:
                self._weights[version] = status.updates, digest

    def _generation(self, adapter: str) -> int | None:
        living = [a.generation for a in self._client.adapters() if a.name == adapter and not a.retired]
        return living[0] if living else None


class RecordingClient(RolloutClient):
    """A `RolloutClient` whose `generate` adds receipts, for trainers that call it themselves.

    ```python
    client = RecordingClient("127.0.0.1:50051", record="samples.jsonl")
    trainer = GRPOTrainer(..., client=client)  # of rollout_client.trl
    client.recorder.note = {"run": 3}
    ```
    """

    def __init__(
        self,
        address: str,
        timeout: float | None = None,
        token: str | None = None,
        *,
        record: str | os.PathLike[str],
        digests: bool = True,
        images: str | os.PathLike[str] | None = None,
        **connection: Any,
    ) -> None:
        """Takes the arguments of `RolloutClient`; `record` is the `path` of a `Recorder`, the others are its own."""
        super().__init__(address, timeout, token, **connection)
        self.recorder = Recorder(self, record, digests=digests, images=images)

    def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """Calls `RolloutClient.generate` and adds the receipts."""
        return self.recorder._recorded(partial(super().generate, prompts, n, sampling), sampling, options, None)

    def close(self) -> None:
        """Closes the connection and the file."""
        super().close()
        self.recorder.close()


def _ends_in_a_line(file: TextIO) -> bool:
    """Whether a file ends within a line."""
    with Path(file.name).open("rb") as written:
        size = written.seek(0, os.SEEK_END)
        written.seek(max(size - 1, 0))
        return written.read(1) not in (b"", b"\n")


def routing_hash(output: PromptOutput, sample: Sample) -> str | None:
    """The digest of the experts that the tokens of a prompt and its sample took; None if they were not returned."""
    if output.routing is None or sample.routing is None:
        return None
    return join_routing(output.routing, sample.routing).hash


def server_facts(client: RolloutClient) -> dict[str, Any]:
    """The facts about the server that a receipt has."""
    info = client.info()
    return {name: getattr(info, name) for name in _FACTS}


def weights_digest(client: RolloutClient) -> tuple[int, str]:
    """The serving version and the digest of its weights: the SHA-256 of the output of `rollout checksum`.

    Equal digests mean that every parameter has the same bits, whatever the versions are.

    Raises:
        PermissionDenied: the token does not have the role `control`.
        FailedPrecondition: the weights are asleep or missing.
    """
    response = client._connection.call(_proto.CHECKSUM, _convert_weights.checksum_request(None))
    lines = "".join(f"{digest}  {name}\n" for name, digest in _convert_weights.checksums(response).items())
    return response.weight_version, hashlib.sha256(lines.encode()).hexdigest()
