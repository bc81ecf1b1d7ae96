"""Which policy the fleet has, by digests, and how a replica that missed it gets it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from ..aio import AsyncRolloutClient
from ..options import PushKind
from ..types import UpdateResult

UNPROVED = "unproved"
"""In place of the digest of a push that a replica has perhaps applied: no push has it."""

Redo = Callable[[AsyncRolloutClient, int], Awaitable[UpdateResult]]
"""Pushes the same again, to one replica, with this version."""


@dataclass(frozen=True)
class Policy:
    """What a replica serves. Two are equal if and only if all their bits are."""

    version: int
    base: str
    """What adapters are merged into: the digest of the checkpoint's parameters, or of the push that replaced it."""
    adapter: str | None = None
    """The digest of the push that is merged into the base."""
    residents: frozenset[tuple[str, str]] = frozenset()
    """Names and digests of the adapters beside the policy."""

    def without(self, name: str) -> Policy:
        """The same without a resident adapter."""
        return replace(self, residents=frozenset(held for held in self.residents if held[0] != name))


@dataclass(frozen=True)
class Change:
    """What a push makes of a policy."""

    kind: PushKind
    version: int
    name: str | None = None
    """Under which an adapter becomes resident; the policy stays."""

    def applied(self, policy: Policy, digest: str) -> Policy:
        """The policy afterwards, of a push with this digest."""
        if self.name is not None:
            others = policy.without(self.name).residents
            return replace(policy, residents=others | {(self.name, digest)})
        if self.kind == "lora":
            return replace(policy, version=self.version, adapter=digest)
        base = f"full:{digest}" if self.kind == "full" else f"{policy.base}+{policy.adapter}+{digest}"
        return replace(policy, version=self.version, base=base, adapter=None)

    def fits(self, held: Policy | None, policy: Policy) -> bool:
        """Whether a replica that holds one policy comes to the same as those that hold the other."""
        if self.kind == "full":
            return True
        if held is None or held.base != policy.base:
            return False
        return self.kind == "lora" or held.adapter == policy.adapter


@dataclass
class Memory:
    """How to push again what the policy is made of; what is not here cannot be pushed again."""

    base: Redo | None = None
    adapter: Redo | None = None
    residents: dict[str, Redo] = field(default_factory=dict)

    def note(self, change: Change, redo: Redo | None) -> None:
        """A push was applied."""
        if change.name is not None:
            self.residents.pop(change.name, None)
            if redo is not None:
                self.residents[change.name] = redo
        elif change.kind == "lora":
            self.adapter = redo
        else:
            self.base, self.adapter = redo if change.kind == "full" else None, None


def digest_of_parameters(checksums: Mapping[str, str]) -> str:
    """One digest of all parameters as they serve, from the SHA-256 of each."""
    lines = "".join(f"{name} {checksum}\n" for name, checksum in sorted(checksums.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
