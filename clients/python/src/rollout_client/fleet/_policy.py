"""The fleet's policy, by digests, and how to push it again to a replica that missed it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from ..aio import AsyncRolloutClient
from ..options import PushKind
from ..types import UpdateResult

UNPROVED = "unproved"
"""Replaces the digest of a push that a replica may have applied; no push has this digest."""

Repush = Callable[[AsyncRolloutClient, int], Awaitable[UpdateResult]]
"""Repeats a push to one replica, with this version."""


@dataclass(frozen=True)
class Policy:
    """The weights that a replica serves. Two policies are equal if and only if all their bits are."""

    version: int
    base: str
    """The base of merged adapters: the digest of the checkpoint's parameters, or of the push that replaced them."""
    adapter: str | None = None
    """The digest of the push that is merged into the base."""
    residents: frozenset[tuple[str, str]] = frozenset()
    """Names and digests of the resident adapters."""

    def without(self, name: str) -> Policy:
        """The policy without this resident adapter."""
        return replace(self, residents=frozenset(held for held in self.residents if held[0] != name))


@dataclass(frozen=True)
class Change:
    """The effect of a push on a policy."""

    kind: PushKind
    version: int
    name: str | None = None
    """The name of an adapter that becomes resident; the policy itself stays."""

    def applied(self, policy: Policy, digest: str) -> Policy:
        """The policy after a push with this digest."""
        if self.name is not None:
            others = policy.without(self.name).residents
            return replace(policy, residents=others | {(self.name, digest)})
        if self.kind == "lora":
            return replace(policy, version=self.version, adapter=digest)
        base = f"full:{digest}" if self.kind == "full" else f"{policy.base}+{policy.adapter}+{digest}"
        return replace(policy, version=self.version, base=base, adapter=None)

    def fits(self, held: Policy | None, policy: Policy) -> bool:
        """Whether the push gives a replica that holds one policy the same result as replicas that hold the other."""
        if self.kind == "full":
            return True
        if held is None or held.base != policy.base:
            return False
        return self.kind == "lora" or held.adapter == policy.adapter


@dataclass
class PushHistory:
    """How to repeat the pushes that the policy consists of; None for those that cannot be repeated."""

    base: Repush | None = None
    adapter: Repush | None = None
    residents: dict[str, Repush] = field(default_factory=dict)

    def record(self, change: Change, repush: Repush | None) -> None:
        """Records a push that was applied."""
        if change.name is not None:
            self.residents.pop(change.name, None)
            if repush is not None:
                self.residents[change.name] = repush
        elif change.kind == "lora":
            self.adapter = repush
        else:
            self.base, self.adapter = repush if change.kind == "full" else None, None


def digest_of_parameters(checksums: Mapping[str, str]) -> str:
    """One digest of all parameters, from the SHA-256 of each."""
    lines = "".join(f"{name} {checksum}\n" for name, checksum in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
