//! The state machine of the engine's lifecycle: which commands each state allows, and which state follows. It is pure:
//! every pair of state and command has its line here, and the engine carries the commands out.

use super::command::{LifecycleStatus, SleepLevel, WakeTags};
use crate::error::{Error, Result};
use crate::observe::PushKind;

/// State of the lifecycle, which determines the allowed commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// The engine steps.
    #[default]
    Running,
    /// Nothing steps, and new requests are held.
    Paused,
    /// Some or all memory is released.
    Asleep(AsleepState),
    /// All memory is awake, but the weights hold no policy. After a complete push the engine is paused if `paused`;
    /// otherwise it runs.
    WeightsMissing { paused: bool },
}

/// The memory that is awake during a sleep, and the state of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsleepState {
    pub level: SleepLevel,
    /// The memory that is awake again; never all of it.
    pub resident: WakeTags,
    /// Whether there is a policy. It is in the weights if they are awake; otherwise it is loaded when they wake.
    pub whole: bool,
    /// Whether that policy was pushed while the weights were asleep.
    pub pending: bool,
}

impl State {
    pub fn status(self) -> LifecycleStatus {
        match self {
            Self::Running => LifecycleStatus::Running,
            Self::Paused => LifecycleStatus::Paused,
            Self::Asleep(AsleepState { level, resident, pending, .. }) => {
                LifecycleStatus::Asleep { level, resident, pending_update: pending }
            }
            Self::WeightsMissing { .. } => LifecycleStatus::WeightsMissing,
        }
    }

    /// Checks that a new request may be accepted or held.
    ///
    /// # Errors
    /// `FailedPrecondition` while the server is asleep or its weights are missing: the server cannot know when that
    /// ends.
    pub fn check_request(self) -> Result<()> {
        match self {
            Self::Running | Self::Paused => Ok(()),
            Self::Asleep(_) => refuse("the server is asleep; call Wake and send the request again"),
            Self::WeightsMissing { .. } => refuse(
                "the weights are missing: push a complete policy (FULL or LORA), or call Wake with reload, and send \
                 the request again",
            ),
        }
    }

    pub fn pause(self) -> Result<Self> {
        match self {
            Self::Running | Self::Paused => Ok(Self::Paused),
            Self::Asleep(_) => refuse("the server is asleep: nothing steps; call Wake first"),
            Self::WeightsMissing { .. } => refuse("the weights are missing: nothing steps; push a policy first"),
        }
    }

    pub fn resume(self) -> Result<Self> {
        match self {
            Self::Running | Self::Paused => Ok(Self::Running),
            Self::Asleep(_) => refuse("the server is asleep; call Wake instead of Resume"),
            Self::WeightsMissing { .. } => refuse("the weights are missing; push a complete policy instead of Resume"),
        }
    }

    /// The state after a sleep. Level 2 is always possible, level 1 only if there is a policy to keep.
    pub fn sleep(self, level: SleepLevel) -> Result<Self> {
        let (whole, pending) = match self {
            Self::Running | Self::Paused => (true, false),
            Self::Asleep(asleep) => (asleep.whole, asleep.pending),
            Self::WeightsMissing { .. } => (false, false),
        };
        let resident = WakeTags { weights: false, kv_cache: false };
        match level {
            SleepLevel::One if !whole => {
                refuse("level 1 keeps the policy, and there is none: push a complete one first, or sleep at level 2")
            }
            SleepLevel::One => Ok(Self::Asleep(AsleepState { level, resident, whole, pending })),
            SleepLevel::Two => Ok(Self::Asleep(AsleepState { level, resident, whole: false, pending: false })),
        }
    }

    /// The state after the weights, the KV cache or both are awake again. With `reload`, waking the weights loads the
    /// checkpoint if there is no policy.
    pub fn wake(self, tags: WakeTags, reload: bool) -> Self {
        let reloaded = reload && tags.weights;
        match self {
            Self::Running | Self::Paused => self,
            Self::WeightsMissing { .. } if reloaded => self.complete(),
            Self::WeightsMissing { .. } => self,
            Self::Asleep(asleep) => {
                let resident = WakeTags {
                    weights: asleep.resident.weights || tags.weights,
                    kv_cache: asleep.resident.kv_cache || tags.kv_cache,
                };
                let whole = asleep.whole || reloaded;
                match (resident.weights && resident.kv_cache, whole) {
                    (true, true) => Self::Running,
                    (true, false) => Self::WeightsMissing { paused: false },
                    (false, _) => {
                        let pending = asleep.pending && !resident.weights;
                        Self::Asleep(AsleepState { resident, whole, pending, ..asleep })
                    }
                }
            }
        }
    }

    /// Checks that a push may begin, or be applied. A merged LoRA loads the base if necessary, so it needs neither
    /// weights nor a policy. A FULL push needs the memory of the weights, and a DELTA also the policy that it changes.
    /// A resident adapter needs a server that can serve it.
    pub fn check_push(self, push: PushKind) -> Result<()> {
        let asleep = match self {
            Self::Asleep(asleep) => Some(asleep),
            _ => None,
        };
        match push {
            PushKind::Lora => Ok(()),
            PushKind::Adapter if matches!(self, Self::Running | Self::Paused) => Ok(()),
            PushKind::Adapter => {
                refuse("an adapter can become resident while the server runs or is paused; wake it first")
            }
            PushKind::Full | PushKind::Delta if asleep.is_some_and(|a| !a.resident.weights) => {
                refuse("the weights are asleep; wake the weights first")
            }
            PushKind::Delta if !self.has_policy() => {
                refuse("a DELTA changes a policy, and there is none: push a complete one (FULL or LORA) first")
            }
            PushKind::Full | PushKind::Delta => Ok(()),
        }
    }

    /// The state after a part of a FULL push was written in place.
    pub fn written_in_part(self) -> Result<Self> {
        match self {
            Self::Running => refuse("weights are written in place only while paused or asleep; the server runs again"),
            Self::Paused => Ok(Self::WeightsMissing { paused: true }),
            Self::WeightsMissing { .. } => Ok(self),
            Self::Asleep(asleep) if asleep.resident.weights => Ok(Self::Asleep(AsleepState { whole: false, ..asleep })),
            Self::Asleep(_) => refuse("the weights are asleep; wake the weights first"),
        }
    }

    /// The state after an order failed while it wrote: the weights are awake but hold no policy.
    pub fn lost(self) -> Self {
        match self {
            Self::Running => Self::WeightsMissing { paused: false },
            Self::Paused => Self::WeightsMissing { paused: true },
            Self::WeightsMissing { .. } => self,
            Self::Asleep(asleep) if asleep.resident.kv_cache => Self::WeightsMissing { paused: false },
            Self::Asleep(asleep) => {
                let resident = WakeTags { weights: true, kv_cache: false };
                Self::Asleep(AsleepState { resident, whole: false, pending: false, ..asleep })
            }
        }
    }

    /// The state after a complete push.
    pub fn complete(self) -> Self {
        match self {
            Self::Running | Self::Paused => self,
            Self::WeightsMissing { paused: true } => Self::Paused,
            Self::WeightsMissing { paused: false } => Self::Running,
            Self::Asleep(asleep) => {
                Self::Asleep(AsleepState { whole: true, pending: !asleep.resident.weights, ..asleep })
            }
        }
    }

    /// Checks that the weights can be read.
    pub fn check_checksum(self) -> Result<()> {
        match self {
            Self::Asleep(asleep) if !asleep.resident.weights => refuse("the weights are asleep; call Wake first"),
            _ if !self.has_policy() => refuse("the weights are missing; push a complete policy first"),
            _ => Ok(()),
        }
    }

    pub fn has_policy(self) -> bool {
        match self {
            Self::Running | Self::Paused => true,
            Self::Asleep(asleep) => asleep.whole,
            Self::WeightsMissing { .. } => false,
        }
    }

    pub fn weights_awake(self) -> bool {
        !matches!(self, Self::Asleep(asleep) if !asleep.resident.weights)
    }

    pub fn kv_awake(self) -> bool {
        !matches!(self, Self::Asleep(asleep) if !asleep.resident.kv_cache)
    }
}

fn refuse<T>(why: &str) -> Result<T> {
    Err(Error::FailedPrecondition(why.into()))
}
