//! Phases and spans: periods of time, each with the work that filled it.

/// An activity of the engine, or of a push beside it, that lasts for some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// The model is being loaded.
    Load,
    /// The engine has nothing to do: there are no requests.
    Idle,
    /// All requests wait for a newer policy.
    WaitVersion,
    /// All requests wait for an adapter to be loaded.
    WaitAdapter,
    /// All requests are suspended, because their readers lag.
    WaitReaders,
    /// Nothing steps until Resume.
    Paused,
    /// Memory is released, and nothing steps until Wake.
    Asleep,
    /// The weights are missing, and nothing steps until a complete push.
    WeightsMissing,
    /// Steps that compute prompts only.
    Prefill,
    /// Steps in which every sequence decodes.
    Decode,
    /// Steps in which some sequences decode and others compute their prompts.
    Mixed,
    /// Several phases, each too short for a span of its own; the span has the time of each.
    Brief,
    /// A push's memory is reserved and prepared.
    PushReserve,
    /// A push is applied to the weights, and nothing steps.
    PushApply,
    /// A sleep releases memory.
    Sleep,
    /// A wake takes memory back and loads the weights.
    Wake,
    /// Like `Wake`, but the checkpoint is loaded as the policy.
    Reload,
    /// Weights are read for a checksum, while nothing steps.
    Checksum,
    /// A push's bytes arrive, and each tensor is verified once it is complete.
    PushReceive,
    /// The rest of the push is verified after its last byte.
    PushVerify,
    /// A verified push waits for the engine, or for requests to end, and is applied.
    PushCommit,
}

/// Number of phases.
pub(super) const PHASES: usize = Phase::ALL.len();

impl Phase {
    pub const ALL: [Self; 21] = [
        Self::Load,
        Self::Idle,
        Self::WaitVersion,
        Self::WaitAdapter,
        Self::WaitReaders,
        Self::Paused,
        Self::Asleep,
        Self::WeightsMissing,
        Self::Prefill,
        Self::Decode,
        Self::Mixed,
        Self::Brief,
        Self::PushReserve,
        Self::PushApply,
        Self::Sleep,
        Self::Wake,
        Self::Reload,
        Self::Checksum,
        Self::PushReceive,
        Self::PushVerify,
        Self::PushCommit,
    ];

    /// Name in replies, traces and labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Idle => "idle",
            Self::WaitVersion => "wait_version",
            Self::WaitAdapter => "wait_adapter",
            Self::WaitReaders => "wait_readers",
            Self::Paused => "paused",
            Self::Asleep => "asleep",
            Self::WeightsMissing => "weights_missing",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
            Self::Brief => "brief",
            Self::PushReserve => "push_reserve",
            Self::PushApply => "push_apply",
            Self::Sleep => "sleep",
            Self::Wake => "wake",
            Self::Reload => "reload",
            Self::Checksum => "checksum",
            Self::PushReceive => "push_receive",
            Self::PushVerify => "push_verify",
            Self::PushCommit => "push_commit",
        }
    }

    /// Whether the device is idle, because there are no requests or because a command stopped it.
    pub fn is_waiting(self) -> bool {
        matches!(
            self,
            Self::Idle
                | Self::WaitVersion
                | Self::WaitAdapter
                | Self::WaitReaders
                | Self::Paused
                | Self::Asleep
                | Self::WeightsMissing
        )
    }

    /// Whether the phase consists of steps.
    pub fn is_step(self) -> bool {
        matches!(self, Self::Prefill | Self::Decode | Self::Mixed)
    }

    /// Whether a short span of this phase may be folded into a brief one. Pushes, sleeps and wakes keep their spans:
    /// they are rare, and their attributes matter.
    pub(super) fn is_foldable(self) -> bool {
        self.is_step() || self.is_waiting() || self == Self::Checksum
    }

    /// Whether this is a phase of the engine's thread, not of a push beside it.
    pub fn is_of_engine(self) -> bool {
        !matches!(self, Self::PushReceive | Self::PushVerify | Self::PushCommit)
    }

    pub(super) fn from_index(index: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(index).ok()?).copied()
    }
}

/// Number of words of a span in its ring.
pub(super) const SPAN_WORDS: usize = 12;

/// A period of time with its phase and attributes. Times are nanoseconds after the timeline's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Number of the span in its track, ascending. The last two spans of a track may still change.
    pub id: u64,
    pub phase: Phase,
    pub start: u64,
    /// `None` while it lasts.
    pub end: Option<u64>,
    /// Number of steps, and of tokens that they computed and sampled.
    pub steps: u64,
    pub computed_tokens: u64,
    pub sampled_tokens: u64,
    /// Version of the policy at the end of the span.
    pub weight_version: u64,
    /// Bytes that a push sent, a sleep released or a wake took back.
    pub bytes: u64,
    /// Number of the push, for the phases of a push.
    pub push: u64,
    /// Level of the sleep, for [`Phase::Sleep`].
    pub level: u64,
    /// For [`Phase::Brief`]: time in prefill steps, decode steps, mixed steps and waiting phases; the rest is other
    /// work. These share their words with `bytes`, `push` and `level`, which a brief span does not have.
    pub parts: [u64; 4],
}

impl Span {
    pub fn new(id: u64, phase: Phase, start: u64) -> Self {
        Self {
            id,
            phase,
            start,
            end: None,
            steps: 0,
            computed_tokens: 0,
            sampled_tokens: 0,
            weight_version: 0,
            bytes: 0,
            push: 0,
            level: 0,
            parts: [0; 4],
        }
    }

    /// The end of the span, or `now` if it is open.
    pub fn end_or(&self, now: u64) -> u64 {
        self.end.unwrap_or(now).max(self.start)
    }

    /// The time in each phase between `from` and `now`. A brief span that `from` cuts counts in proportion.
    pub fn times(&self, from: u64, now: u64) -> Vec<(Phase, u64)> {
        let (start, end) = (self.start.max(from), self.end_or(now));
        let inside = end.saturating_sub(start);
        if self.phase != Phase::Brief {
            return vec![(self.phase, inside)];
        }
        let whole = (end - self.start).max(1);
        let share = |part: u64| (u128::from(part) * u128::from(inside) / u128::from(whole)) as u64;
        let mut times: Vec<_> =
            [Phase::Prefill, Phase::Decode, Phase::Mixed, Phase::Idle].into_iter().zip(self.parts.map(share)).collect();
        let known: u64 = times.iter().map(|time| time.1).sum();
        times.push((Phase::Brief, inside.saturating_sub(known)));
        times
    }

    /// Appends the time and the counts of `other`, which follows this span, and makes this one brief.
    pub(super) fn fold(&mut self, other: &Self) {
        if self.phase != Phase::Brief {
            let before = *self;
            *self = Self { phase: Phase::Brief, ..Self::new(before.id, Phase::Brief, before.start) };
            self.end = Some(before.start);
            self.fold(&before);
        }
        let end = other.end_or(other.start);
        let took = end - other.start;
        let part = match other.phase {
            Phase::Prefill => Some(0),
            Phase::Decode => Some(1),
            Phase::Mixed => Some(2),
            phase if phase.is_waiting() => Some(3),
            _ => None,
        };
        if let Some(part) = part {
            self.parts[part] += took;
        }
        self.end = Some(end);
        self.steps += other.steps;
        self.computed_tokens += other.computed_tokens;
        self.sampled_tokens += other.sampled_tokens;
        self.weight_version = other.weight_version;
    }

    pub(super) fn to_words(self) -> [u64; SPAN_WORDS] {
        let parts = match self.phase {
            Phase::Brief => self.parts,
            _ => [self.bytes, self.push, self.level, 0],
        };
        [
            self.id,
            self.phase as u64,
            self.start,
            self.end.unwrap_or(u64::MAX),
            self.steps,
            self.computed_tokens,
            self.sampled_tokens,
            self.weight_version,
            parts[0],
            parts[1],
            parts[2],
            parts[3],
        ]
    }

    pub(super) fn from_words(words: &[u64; SPAN_WORDS]) -> Option<Self> {
        let [id, phase, start, end, steps, computed_tokens, sampled_tokens, weight_version, rest @ ..] = *words;
        let phase = Phase::from_index(phase)?;
        let end = (end != u64::MAX).then_some(end);
        let is_brief = phase == Phase::Brief;
        let [bytes, push, level, _] = if is_brief { [0; 4] } else { rest };
        let parts = if is_brief { rest } else { [0; 4] };
        Some(Self {
            id,
            phase,
            start,
            end,
            steps,
            computed_tokens,
            sampled_tokens,
            weight_version,
            bytes,
            push,
            level,
            parts,
        })
    }
}
