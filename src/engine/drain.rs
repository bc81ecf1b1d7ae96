//! Drains: commands that wait until the accepted requests have ended.

use super::client::CancelFlag;
use super::command::{Reply, SleepLevel, SleepReply, UpdateReply};
use crate::error::{Error, Result};
use crate::weights::WeightUpdate;

/// A command that takes effect when all accepted requests have ended.
pub(super) enum Drain {
    Pause { cancel: CancelFlag, reply: Reply<Result<()>> },
    Sleep { level: SleepLevel, cancel: CancelFlag, reply: Reply<Result<SleepReply>> },
    Commit(Commit),
}

/// The commit of the open update. It is dropped with the update, which has its own cancel flag.
pub(super) struct Commit {
    pub content: WeightUpdate,
    pub tower: Option<[u8; 16]>,
    pub reply: Reply<Result<UpdateReply>>,
}

impl Drain {
    pub fn refuse(self, error: Error) {
        match self {
            Self::Pause { reply, .. } => reply(Err(error)),
            Self::Sleep { reply, .. } => reply(Err(error)),
            Self::Commit(commit) => (commit.reply)(Err(error)),
        }
    }

    pub fn is_commit(&self) -> bool {
        matches!(self, Self::Commit(_))
    }
}

/// The waiting commands in their order of arrival.
#[derive(Default)]
pub(super) struct Drains(Vec<Drain>);

impl Drains {
    pub fn push(&mut self, drain: Drain) {
        self.0.push(drain);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has_pause(&self) -> bool {
        self.0.iter().any(|drain| matches!(drain, Drain::Pause { .. }))
    }

    pub fn has_sleep(&self) -> bool {
        self.0.iter().any(|drain| matches!(drain, Drain::Sleep { .. }))
    }

    pub fn num_commits(&self) -> usize {
        self.0.iter().filter(|drain| drain.is_commit()).count()
    }

    /// Takes the first command.
    pub fn next(&mut self) -> Option<Drain> {
        (!self.is_empty()).then(|| self.0.remove(0))
    }

    /// Drops pauses and sleeps whose callers are gone, and a commit if `update_is_gone`.
    pub fn drop_cancelled(&mut self, update_is_gone: bool) {
        self.0.retain(|drain| match drain {
            Drain::Pause { cancel, .. } | Drain::Sleep { cancel, .. } => !cancel.is_cancelled(),
            Drain::Commit(_) => !update_is_gone,
        });
    }

    /// Cancels the commands for which `which` is true. Their callers get `error`.
    pub fn refuse(&mut self, error: &Error, which: impl Fn(&Drain) -> bool) {
        for drain in self.0.extract_if(.., |drain| which(drain)) {
            drain.refuse(error.clone());
        }
    }
}
