//! Checksums are computed between steps, of one policy, and only for callers that still wait.

use std::sync::mpsc::{Receiver, channel, sync_channel};

use super::rig::*;
use crate::engine::*;

impl Rig {
    /// Requests a checksum, and returns the channel of its reply.
    pub fn begin_checksum(&mut self, names: &[&str], cancel: &CancelFlag) -> Receiver<Result<ChecksumReply>> {
        let (names, cancel) = (names.iter().map(|name| name.to_string()).collect(), cancel.clone());
        self.call(|reply| Command::Checksum { names, cancel, reply })
    }

    fn continue_checksum(&mut self) -> Result<()> {
        self.engine.checksums.compute_piece(&mut self.engine.core)
    }

    /// Completes all checksums, without a step between their pieces.
    pub fn finish_checksums(&mut self) {
        while !self.engine.checksums.is_empty() {
            self.continue_checksum().unwrap();
        }
    }

    pub fn checksum(&mut self, names: &[&str]) -> Result<ChecksumReply> {
        let reply = self.begin_checksum(names, &CancelFlag::default());
        self.finish_checksums();
        told(&reply).reply()
    }
}

#[test]
fn generation_goes_on_beside_checksums() {
    let mut rig = Rig::new();
    let reference = rig.checksum(&[]).unwrap();
    let asked = rig.submit(ask("a", 3, 4));
    let replies = [0; 4].map(|_| rig.begin_checksum(&[], &CancelFlag::default()));
    let mut pieces = 0;
    while rig.engine.core.can_step() {
        rig.step();
        rig.continue_checksum().unwrap();
        pieces += 1;
    }
    assert_eq!((sampled(&asked.completion()).len(), pieces), (4, 4), "one piece for each step");
    assert!(replies.iter().all(|reply| told(reply).is_waiting()), "a parameter alone has three pieces");
    rig.finish_checksums();
    assert!(replies.iter().all(|reply| told(reply).reply().unwrap() == reference));
}

#[test]
fn a_checksum_is_of_one_policy() {
    let mut rig = Rig::new();
    let reply = rig.begin_checksum(&[], &CancelFlag::default());
    (0..5).for_each(|_| rig.continue_checksum().unwrap());
    rig.push_lora(RunningPolicy::Keep);
    rig.finish_checksums();
    let checksum = told(&reply).reply().unwrap();
    assert_eq!(checksum, rig.checksum(&[]).unwrap());
    assert_eq!(checksum.weight_version, 1);

    let reply = rig.begin_checksum(&[], &CancelFlag::default());
    rig.continue_checksum().unwrap();
    told(&rig.sleep(SleepLevel::One, DrainMode::Wait)).reply().unwrap();
    rig.finish_checksums();
    assert!(matches!(told(&reply).reply(), Err(Error::FailedPrecondition(_))), "the weights went to sleep");
}

#[test]
fn checksums_of_callers_that_are_gone_are_dropped_and_few_may_wait() {
    let mut rig = Rig::new();
    let gone = CancelFlag::default();
    let mut replies: Vec<_> = (0..64).map(|_| rig.begin_checksum(&[], &gone)).collect();
    let refused = rig.begin_checksum(&[], &gone);
    assert!(matches!(told(&refused).reply(), Err(Error::ResourceExhausted(_))));
    gone.cancel();
    replies.push(rig.begin_checksum(&[], &CancelFlag::default()));
    assert_eq!(rig.engine.checksums.len(), 1);
    rig.finish_checksums();
    let last = replies.pop().unwrap();
    assert!(told(&last).reply().is_ok() && replies.iter().all(|reply| matches!(told(reply), Told::Dropped)));
}

#[test]
fn an_end_refuses_the_checksums_that_wait() {
    let (sender, commands) = sync_channel(2);
    let (reply, told_to) = channel();
    let reply: Reply<Result<ChecksumReply>> = Box::new(move |value| reply.send(value).unwrap());
    sender.send(Command::Checksum { names: vec![], cancel: CancelFlag::default(), reply }).unwrap();
    sender.send(Command::Shutdown { grace: std::time::Duration::ZERO }).unwrap();
    Rig::with_commands(commands).engine.run().unwrap();
    assert!(matches!(told(&told_to).reply(), Err(Error::Unavailable(_))));
}
