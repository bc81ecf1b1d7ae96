"""The log-probabilities of samples that trainers' importance ratios need: over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .returns import Returns
from .types import Sample, SamplingParams


def ratio_returns(sampling: SamplingParams) -> Returns:
    """The further values that `ratio_logprobs` needs: the mass of the tokens that filters leave.

    At temperature 1 `raw_logprobs` are enough. With penalties or `logit_bias` the mass is of the changed distribution,
    and of no use.
    """
    excludes = (
        *(sampling.top_p < 1, sampling.top_k > 0, sampling.min_p > 0, sampling.min_tokens > 0),
        *(sampling.allowed_token_ids, sampling.bad_words, sampling.structured_outputs),
    )
    changes = (
        *(sampling.repetition_penalty != 1, sampling.presence_penalty, sampling.frequency_penalty),
        *(sampling.logit_bias,),
    )
    needed = sampling.temperature not in (0, 1) and any(excludes) and not any(changes)
    return Returns(support=True, max_support_ids=0) if needed else Returns()


def ratio_logprobs(sample: Sample, sampling: SamplingParams) -> npt.NDArray[np.float32]:
    """The log-probabilities that a trainer computes for the same weights: over all tokens, at the temperature.

    Penalties and `logit_bias` at another temperature than 1 stay in them.
    """
    if sampling.temperature == 1:
        return sample.raw_logprobs
    masses = None if sample.returned is None else sample.returned.support_log_masses
    return sample.logprobs if masses is None else sample.logprobs + masses
