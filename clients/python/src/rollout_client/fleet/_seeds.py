"""The seeds that a server gives to the samples of a request, so that a prompt has the same ones on any replica."""

from __future__ import annotations

_WORD = (1 << 64) - 1


def prompt_seed(seed: int, prompt_index: int) -> int:
    """The seed with which a prompt has alone the samples that it has as number `prompt_index` of a request.

    The server's rule: Murmur3's finaliser (Appleby 2011) over the seed and the index; the first prompt has the seed
    itself.
    """
    if prompt_index == 0:
        return seed
    mixed = (seed + prompt_index * 0xD1B5_4A32_D192_ED03) & _WORD
    mixed = ((mixed ^ (mixed >> 33)) * 0xFF51_AFD7_ED55_8CCD) & _WORD
    mixed = ((mixed ^ (mixed >> 33)) * 0xC4CE_B9FE_1A85_EC53) & _WORD
    return mixed ^ (mixed >> 33)


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one sample of a prompt with this seed.

    The server's rule: SplitMix64 (Steele et al. 2014) over the seed and the index; the first sample has the seed
    itself.
    """
    if sample_index == 0:
        return seed
    mixed = (seed + sample_index * 0x9E37_79B9_7F4A_7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58_476D_1CE4_E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D0_49BB_1331_11EB) & _WORD
    return mixed ^ (mixed >> 31)
