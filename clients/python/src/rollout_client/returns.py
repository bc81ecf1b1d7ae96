"""Further values of each token: entropies, supports, many most likely tokens, scores under other policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument

NO_TOKEN = 0xFFFFFFFF
"""Stands in `Returned.top_ids` where fewer tokens have a probability than were asked for."""


@dataclass(frozen=True)
class Returns:
    """The further values to return for each sampled or scored token, beside its log-probabilities."""

    entropy: bool = False
    """The entropies of the model's own distribution and of the one that tokens are sampled from."""
    support: bool = False
    """The tokens that have a probability in the distribution sampled from: those that `top_k`, `top_p`, `min_p`,
    allowed ids and structured outputs leave."""
    max_support_ids: int | None = None
    """The most ids of one token's support, at most 65,536; None is 4,096. A larger support has no ids, but its size and
    its mass."""
    top: int = 0
    """How many most likely tokens to return in arrays, at most 1,024; excludes the option `top_logprobs`."""
    top_of: Literal["raw", "processed"] = "raw"
    """The distribution of `top` and of the ranks. For the prompts of `generate` it is always `"raw"`."""
    top_dtype: Literal["float32", "bfloat16"] = "float32"
    """How the server sends the log-probabilities of `top`: 8 or 6 bytes an entry with the id."""
    references: Sequence[str | None] = ()
    """Policies under which each sample is scored when it has ended, and each sequence of `score`, at most 8, each once:
    names of resident adapters, and None for the policy without an adapter. `Sample.references` and `Score.references`
    have the scores."""
    current: bool = False
    """Score each sample under the policy that serves when it ends: `Sample.current`, for samples during which a push
    came. Not for `score`, and not with penalties, `min_tokens`, `bad_words` or `structured_outputs`."""
    base: bool = False
    """Score each sample or sequence under the base below the merged adapter, as under a reference: `Sample.base`,
    `Score.base`. The server must have `--keep-base`."""
    divergences: bool = False
    """The divergences over the whole vocabulary between the request's policy and each reference, and the base:
    `PolicyScore.kl` and `PolicyScore.reverse_kl`. Takes memory of the server's `--request-bytes`: 4 bytes times the
    model's hidden size for each token, until the sample is sent."""


@dataclass(frozen=True)
class PolicyScore:
    """Log-probabilities of the `T` tokens of a sample or of a scored sequence under one policy. The first token of a
    scored sequence has NaN."""

    weight_version: int
    """The version of the policy."""
    raw_logprobs: npt.NDArray[np.float32]
    """`[T]`, under the policy's own distribution, as `Sample.raw_logprobs`."""
    logprobs: npt.NDArray[np.float32]
    """`[T]`. For a reference and the base: its logits divided by the request's temperature (1 if that is 0), without
    filters and penalties. For the current policy: under the distribution that tokens are sampled from, as
    `Sample.logprobs`."""
    kl: npt.NDArray[np.float32] | None = None
    """`[T]`, `KL(policy || this policy)` where each token was predicted, in nats, between the distributions of their
    logits divided by the temperature as in `logprobs`. The policy is the request's own: that which made the token, or,
    where a push came in between, that which serves as the sample ends. None unless `Returns.divergences` was set."""
    reverse_kl: npt.NDArray[np.float32] | None = None
    """`[T]`, `KL(this policy || policy)`."""


@dataclass(frozen=True)
class Returned:
    """The values that `Returns` asked for, one or one row for each of `T` tokens; None or empty where it did not.

    A token without log-probabilities (the first of a prompt or sequence) has NaN, no support, and an empty row.
    """

    raw_entropies: npt.NDArray[np.float32] | None = None
    """`[T]`, of the model's own distribution, in nats."""
    entropies: npt.NDArray[np.float32] | None = None
    """`[T]`, of the distribution sampled from, in nats."""
    support_sizes: npt.NDArray[np.uint32] | None = None
    """`[T]`, the number of tokens in each support."""
    support_log_masses: npt.NDArray[np.float32] | None = None
    """`[T]`, the logarithm of the probability that a support has in the model's own distribution at the temperature in
    use. Subtracted from a log-probability of that distribution, it gives that of the one sampled from."""
    support_ids: tuple[npt.NDArray[np.uint32], ...] | None = None
    """`[T]`, the token ids of each support, ascending; empty for one of more than `max_support_ids` tokens."""
    top_ids: npt.NDArray[np.uint32] | None = None
    """`[T, top]`, most likely first. Where fewer tokens have a probability, a row ends with `NO_TOKEN`."""
    top_logprobs: npt.NDArray[np.float32] | None = None
    """`[T, top]`, their log-probabilities; minus infinity beside `NO_TOKEN`."""

    def support_mask(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Which tokens each support has: a mask for a trainer's logits.

        Args:
            vocab_size: the last dimension of the trainer's logits.

        Returns:
            `[T, vocab_size]`. A row is True everywhere where the support is the whole vocabulary or a token has none.

        Raises:
            InvalidArgument: supports were not returned, or one has more tokens than `max_support_ids`.
        """
        if self.support_ids is None or self.support_sizes is None:
            raise InvalidArgument("support_mask: no supports were returned; ask for Returns(support=True)")
        mask = np.ones((len(self.support_ids), vocab_size), dtype=np.bool_)
        for token, (size, ids) in enumerate(zip(self.support_sizes.tolist(), self.support_ids, strict=True)):
            if len(ids):
                mask[token] = False
                mask[token, ids] = True
            elif 0 < size < vocab_size:
                raise InvalidArgument(
                    f"support_mask: token {token} has a support of {size} tokens whose ids were not returned; raise "
                    "Returns.max_support_ids, or subtract support_log_masses from log-probabilities instead"
                )
        return mask
