//! Our ranks in a trainer's group: one thread per rank, beside the rank's own thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use rollout_kernels::{Broadcast, BroadcastReceiver, Device, DeviceError, Devices, GroupId, Membership};

use super::RankRange;
use super::timeout::TrainerTimeout;
use crate::error::{Error, Result};

/// Takes the bytes that the trainer sends, in pieces and in order. Returns false to take no more.
pub type ByteSink = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// Our ranks in a trainer's group. Dropping this leaves the group.
pub struct TrainerGroup {
    members: Vec<MemberThread>,
}

/// One rank's thread, which ends when its channel of jobs is closed.
struct MemberThread {
    jobs: Option<Sender<ReceiveJob>>,
    thread: Option<JoinHandle<()>>,
}

/// Broadcasts to receive, one after the other.
struct ReceiveJob {
    broadcasts: Arc<[Broadcast]>,
    /// Takes the bytes on the first rank; the other ranks leave them unread.
    sink: Option<ByteSink>,
    timeout: TrainerTimeout,
    done: Sender<Result<()>>,
}

impl TrainerGroup {
    /// Joins with all devices, and waits for all ranks of the group.
    pub(super) fn join(devices: &Devices, id: GroupId, ranks: RankRange, timeout: &TrainerTimeout) -> Result<Self> {
        let (joined, results) = channel();
        let members = devices.iter().enumerate().map(|(i, device)| {
            let membership = Membership { id, rank: ranks.first + i, world: ranks.world };
            MemberThread::start(device.clone(), membership, timeout.clone(), joined.clone())
        });
        let group = Self { members: members.collect::<Result<_>>()? };
        drop(joined);
        all_done(&results, group.members.len(), timeout).map(|()| group)
    }

    /// Receives broadcasts of the trainer. After `sink` has returned false the rest is still received, so that the
    /// trainer can finish. Blocks.
    ///
    /// # Errors
    /// `ResourceExhausted` if a device has no memory for one; `DeadlineExceeded` or `Aborted` if one does not arrive.
    /// The group cannot be used again then.
    pub fn receive(&self, broadcasts: Vec<Broadcast>, sink: ByteSink, timeout: &TrainerTimeout) -> Result<()> {
        let (done, results) = channel();
        let (broadcasts, mut sink) = (Arc::from(broadcasts), Some(sink));
        for member in &self.members {
            let job = ReceiveJob {
                broadcasts: Arc::clone(&broadcasts),
                sink: sink.take(),
                timeout: timeout.clone(),
                done: done.clone(),
            };
            member.send(job)?;
        }
        drop(done);
        all_done(&results, self.members.len(), timeout)
    }
}

/// Waits for the results of all ranks. The first error cancels the other ranks and is the result.
fn all_done(results: &Receiver<Result<()>>, ranks: usize, timeout: &TrainerTimeout) -> Result<()> {
    let (mut first, mut count) = (Ok(()), 0);
    for result in results {
        count += 1;
        if first.is_ok() && result.is_err() {
            timeout.cancel();
            first = result;
        }
    }
    // A rank whose thread has panicked sends none.
    if first.is_ok() && count < ranks {
        return Err(Error::Internal("a thread that receives from the trainer has ended".into()));
    }
    first
}

impl MemberThread {
    fn start(
        device: Device,
        membership: Membership,
        timeout: TrainerTimeout,
        joined: Sender<Result<()>>,
    ) -> Result<Self> {
        let (jobs, to_do) = channel();
        let run = move || {
            let receiver = {
                let wait = timeout.start();
                let receiver = device.join_broadcast(&membership, &|| wait.is_over());
                receiver.map_err(|error| refusal(error, |why| wait.error("the trainer's group", why)))
            };
            match receiver {
                Ok(receiver) => {
                    let _ = joined.send(Ok(()));
                    drop(joined);
                    receive_all(receiver, &to_do);
                }
                Err(error) => _ = joined.send(Err(error)),
            }
        };
        let thread = std::thread::Builder::new().name(format!("broadcast-{}", membership.rank)).spawn(run);
        let thread = thread.map_err(|e| Error::Internal(format!("a thread for the trainer did not start: {e}")))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    fn send(&self, job: ReceiveJob) -> Result<()> {
        let sent = self.jobs.as_ref().expect("taken only by drop").send(job);
        sent.map_err(|_| Error::Internal("the thread that receives from the trainer has ended".into()))
    }
}

impl Drop for MemberThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("a thread that receives from a trainer: {}", crate::error::panic_message(&*panic));
        }
    }
}

/// Body of a member's thread once it has joined.
fn receive_all(mut receiver: BroadcastReceiver, to_do: &Receiver<ReceiveJob>) {
    for ReceiveJob { broadcasts, mut sink, timeout, done } in to_do {
        let mut receive = |broadcast: &Broadcast| receive(&mut receiver, *broadcast, &mut sink, &timeout);
        let received = broadcasts.iter().try_for_each(&mut receive);
        drop(sink);
        receiver.release();
        let _ = done.send(received);
    }
}

fn receive(
    receiver: &mut BroadcastReceiver,
    broadcast: Broadcast,
    sink: &mut Option<ByteSink>,
    timeout: &TrainerTimeout,
) -> Result<()> {
    let wait = timeout.start();
    let mut is_wanted = true;
    let received = match sink {
        Some(sink) => {
            let mut take = |piece: &[u8]| is_wanted = is_wanted && sink(piece);
            receiver.receive(broadcast, Some(&mut take), &|| wait.is_over())
        }
        None => receiver.receive(broadcast, None, &|| wait.is_over()),
    };
    if !is_wanted {
        *sink = None;
    }
    let what = format!("a broadcast of {} bytes", broadcast.bytes());
    received.map_err(|error| refusal(error, |why| wait.error(&what, why)))
}

/// A device's error, as an error for the trainer.
fn refusal(error: DeviceError, other: impl FnOnce(&str) -> Error) -> Error {
    match error {
        DeviceError::OutOfMemory(why) => Error::ResourceExhausted(why),
        DeviceError::Unsupported(why) => other(&why),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn all_are_done_when_each_rank_has_said_so() {
        let timeout = TrainerTimeout::new(Duration::from_secs(3600));
        let all = |said: &[Result<()>]| {
            let (sender, results) = channel();
            said.iter().for_each(|result| sender.send(result.clone()).expect("it is received"));
            drop(sender);
            all_done(&results, 2, &timeout)
        };
        all(&[Ok(()), Ok(())]).expect("both");
        // The thread of the other has panicked.
        assert!(matches!(all(&[Ok(())]), Err(Error::Internal(_))));
        assert!(matches!(all(&[]), Err(Error::Internal(_))));
        let gone = Error::Aborted("it has vanished".into());
        assert!(matches!(all(&[Err(gone.clone()), Ok(())]), Err(Error::Aborted(_))));
        assert!(matches!(all(&[Err(gone)]), Err(Error::Aborted(_))));
    }
}
