"""Stands in for vLLM where TRL imports it in server mode: the trainer's end of its weight transfer, by its protocol and
on the emulated GPU, which torch does not know. Written from what vLLM 0.32 does; none of its code is here."""

__version__ = "0.31.0"


class LLM:
    """Named by TRL's imports; of no use in server mode, as the others."""


class RequestOutput:
    pass


class SamplingParams:
    pass
