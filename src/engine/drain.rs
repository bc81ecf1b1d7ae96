//! What waits for the accepted requests to end.

use super::Engine;
use super::command::{CancelFlag, DrainMode, Reply, SleepLevel, SleepReply, UpdateReply};
use super::lifecycle::State;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::weights::WeightUpdate;

/// What takes effect when all accepted requests have ended.
pub(super) struct Drain {
    pub cancel: CancelFlag,
    pub then: Then,
}

pub(super) enum Then {
    Pause(Reply<Result<()>>),
    Sleep(SleepLevel, Reply<Result<SleepReply>>),
    Commit(Commit),
}

impl Drain {
    pub fn refuse(self, error: Error) {
        match self.then {
            Then::Pause(reply) => reply(Err(error)),
            Then::Sleep(_, reply) => reply(Err(error)),
            Then::Commit(commit) => (commit.reply)(Err(error)),
        }
    }
}

/// What a commit brings.
pub(super) struct Commit {
    pub content: WeightUpdate,
    pub reply: Reply<Result<UpdateReply>>,
}

impl<X: Executor> Engine<X> {
    /// Whether requests are accepted that go on.
    pub(super) fn must_drain(&self) -> bool {
        self.state == State::Running && self.requests.num_accepted() > 0
    }

    /// Whether requests are accepted that stand still.
    pub(super) fn is_frozen(&self) -> bool {
        self.state != State::Running && self.requests.num_accepted() > 0
    }

    /// Carries out, in order, what has waited for the accepted requests to end. If they stand still instead (a pause or
    /// sleep that keeps them came later), what waits for them would wait for ever, and is called off.
    pub(super) fn settle_drains(&mut self) -> Result<()> {
        while !self.drains.is_empty() && !self.must_drain() {
            let drain = self.drains.remove(0);
            if self.is_frozen() {
                let why = "the requests it waited for were made to stand still meanwhile; call again";
                if matches!(drain.then, Then::Commit(_)) {
                    self.roll_back();
                }
                drain.refuse(Error::Aborted(why.into()));
                continue;
            }
            match drain.then {
                Then::Pause(reply) => self.pause(DrainMode::Wait, drain.cancel, reply),
                Then::Sleep(level, reply) => self.sleep(level, DrainMode::Wait, drain.cancel, reply)?,
                Then::Commit(commit) => self.finish_commit(commit)?,
            }
        }
        Ok(())
    }
}
