//! What may go wrong in a run, each counted when it has happened.

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client of a request vanishes, at any of its events.
    ClientVanishes,
    DeadlinePasses,
    /// A reader takes no events for a while.
    SlowReader,
    /// The sender of a push vanishes, at any of its messages.
    PushCut,
    /// A tensor of a push does not have its digest, so that the server ends the push.
    WrongDigest,
    /// The caller of a command that waits is gone.
    WaiterGone,
    /// A device has not the memory to check an order.
    CheckRefused,
    /// A device has not the memory to carry an order out.
    WriteRefused,
    /// No shadow weights can be mapped.
    ShadowRefused,
    /// A device has not the memory that wakes.
    RestoreRefused,
    /// The checkpoint has changed before an order.
    DamageFound,
    /// The checkpoint changes while an order reads it.
    DamageMet,
    /// A rank fails, and ends the engine.
    RankDies,
    /// The adapter that a request names cannot be read.
    ReadFails,
    /// A step takes seconds to minutes.
    SlowStep,
    /// The code that takes a request's events panics.
    ResponderPanics,
    /// Computing a request's answer panics on a rank.
    RowPanics,
    /// A message comes twice.
    Twice,
    /// A message comes after what it was for has ended.
    Late,
    /// A request has the id of one that runs.
    SameId,
    /// The engine's queue has no room for a command.
    QueueFull,
    /// The server is told to shut down, whatever it does.
    Shutdown,
    /// Every handle of the engine is gone.
    HandlesGone,
}

impl Fault {
    pub const ALL: [Self; 23] = [
        Self::ClientVanishes,
        Self::DeadlinePasses,
        Self::SlowReader,
        Self::PushCut,
        Self::WrongDigest,
        Self::WaiterGone,
        Self::CheckRefused,
        Self::WriteRefused,
        Self::ShadowRefused,
        Self::RestoreRefused,
        Self::DamageFound,
        Self::DamageMet,
        Self::RankDies,
        Self::ReadFails,
        Self::SlowStep,
        Self::ResponderPanics,
        Self::RowPanics,
        Self::Twice,
        Self::Late,
        Self::SameId,
        Self::QueueFull,
        Self::Shutdown,
        Self::HandlesGone,
    ];
    /// Those that happen in the executor, when it is next asked for what they spoil.
    pub const OF_DEVICE: [Self; 9] = [
        Self::CheckRefused,
        Self::WriteRefused,
        Self::ShadowRefused,
        Self::RestoreRefused,
        Self::DamageFound,
        Self::DamageMet,
        Self::RankDies,
        Self::SlowStep,
        Self::RowPanics,
    ];
}

/// How often each fault has happened.
#[derive(Clone, Debug, Default)]
pub struct Tally([u64; Fault::ALL.len()]);

impl Tally {
    pub fn count(&mut self, fault: Fault) {
        self.0[fault as usize] += 1;
    }

    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, count)| *sum += count);
    }

    pub fn of(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }

    /// Number of kinds that have happened.
    pub fn kinds(&self) -> usize {
        self.0.iter().filter(|count| **count > 0).count()
    }
}

/// The message of every panic that a run means to cause.
pub const PLANNED_PANIC: &str = "a planned panic";
