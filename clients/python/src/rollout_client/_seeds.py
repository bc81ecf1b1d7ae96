"""The seeds that a server derives for the samples of a request, so that they are the same on any replica."""

from __future__ import annotations

_WORD = (1 << 64) - 1


def prompt_seed(seed: int, prompt_index: int) -> int:
    """The seed with which a prompt alone gets the samples that it gets at `prompt_index` of a request.

    As in the server: Murmur3's finalizer (Appleby 2011) of the seed and the index; the first prompt uses the seed
    unchanged.
    """
    if prompt_index == 0:
        return seed
    mixed = (seed + prompt_index * 0xD1B5_4A32_D192_ED03) & _WORD
    mixed = ((mixed ^ (mixed >> 33)) * 0xFF51_AFD7_ED55_8CCD) & _WORD
    mixed = ((mixed ^ (mixed >> 33)) * 0xC4CE_B9FE_1A85_EC53) & _WORD
    return mixed ^ (mixed >> 33)


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one sample of a prompt with this seed.

    As in the server: SplitMix64 (Steele et al. 2014) of the seed and the index; the first sample uses the seed
    unchanged.
    """
    if sample_index == 0:
        return seed
    mixed = (seed + sample_index * 0x9E37_79B9_7F4A_7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58_476D_1CE4_E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D0_49BB_1331_11EB) & _WORD
    return mixed ^ (mixed >> 31)
