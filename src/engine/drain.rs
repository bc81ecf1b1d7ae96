//! Drains: commands that wait for the accepted requests to end.

use super::Engine;
use super::command::{CancelFlag, DrainMode, Reply, SleepLevel, SleepReply, UpdateReply};
use super::lifecycle::State;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::weights::WeightUpdate;

/// A command that takes effect when all accepted requests have ended.
struct Drain {
    cancel: CancelFlag,
    then: AfterDrain,
}

/// What takes effect after a drain, with the reply to its caller.
pub(super) enum AfterDrain {
    Pause(Reply<Result<()>>),
    Sleep(SleepLevel, Reply<Result<SleepReply>>),
    Commit(Commit),
}

/// All commands that wait, in the order in which they came.
#[derive(Default)]
pub(super) struct Drains(Vec<Drain>);

impl Drains {
    pub fn push(&mut self, cancel: CancelFlag, then: AfterDrain) {
        self.0.push(Drain { cancel, then });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn has_sleep(&self) -> bool {
        self.count(|then| matches!(then, AfterDrain::Sleep(..))) > 0
    }

    /// Number of commands for which `which` is true.
    pub fn count(&self, which: impl Fn(&AfterDrain) -> bool) -> usize {
        self.0.iter().filter(|drain| which(&drain.then)).count()
    }

    /// Takes the command that came first.
    fn next(&mut self) -> Option<Drain> {
        (!self.is_empty()).then(|| self.0.remove(0))
    }

    /// Forgets pauses and sleeps whose callers are gone, and a commit if `update_is_gone`.
    pub fn drop_cancelled(&mut self, update_is_gone: bool) {
        self.0.retain(|drain| match drain.then {
            AfterDrain::Commit(_) => !update_is_gone,
            AfterDrain::Pause(_) | AfterDrain::Sleep(..) => !drain.cancel.is_cancelled(),
        });
    }

    /// Calls off all commands for which `which` is true: their callers get the error.
    pub fn refuse(&mut self, error: &Error, which: impl Fn(&AfterDrain) -> bool) {
        for drain in self.0.extract_if(.., |drain| which(&drain.then)) {
            drain.refuse(error.clone());
        }
    }
}

impl Drain {
    fn refuse(self, error: Error) {
        match self.then {
            AfterDrain::Pause(reply) => reply(Err(error)),
            AfterDrain::Sleep(_, reply) => reply(Err(error)),
            AfterDrain::Commit(commit) => (commit.reply)(Err(error)),
        }
    }
}

/// The commit of the open update.
pub(super) struct Commit {
    pub content: WeightUpdate,
    pub reply: Reply<Result<UpdateReply>>,
}

impl<X: Executor> Engine<X> {
    /// Whether accepted requests are running, so that a command can wait for them to end.
    pub(super) fn must_drain(&self) -> bool {
        self.state == State::Running && self.requests.num_accepted() > 0
    }

    /// Whether there are accepted requests that stand still, since nothing may step: they will not end by themselves.
    pub(super) fn is_frozen(&self) -> bool {
        self.state != State::Running && self.requests.num_accepted() > 0
    }

    /// Carries out, in order, the commands that have waited for the accepted requests to end. If the requests were made
    /// to stand still instead, by a pause or a sleep that keeps them, the commands would wait for ever and are called
    /// off.
    pub(super) fn settle_drains(&mut self) -> Result<()> {
        while !self.must_drain() {
            let Some(drain) = self.drains.next() else { break };
            if self.is_frozen() {
                let why = "the requests it waited for were made to stand still meanwhile; call again";
                if matches!(drain.then, AfterDrain::Commit(_)) {
                    self.roll_back();
                }
                drain.refuse(Error::Aborted(why.into()));
                continue;
            }
            match drain.then {
                AfterDrain::Pause(reply) => self.pause(DrainMode::Wait, drain.cancel, reply),
                AfterDrain::Sleep(level, reply) => self.sleep(level, DrainMode::Wait, drain.cancel, reply)?,
                AfterDrain::Commit(commit) => self.finish_commit(commit)?,
            }
        }
        Ok(())
    }
}
