//! Our ranks in a trainer's group: a thread for each, beside the one that computes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use rollout_kernels::{Broadcast, Device, DeviceError, Devices, Feed, GroupId, Place};

use super::Places;
use super::patience::Patience;
use crate::error::{Error, Result};

/// Takes what the trainer sends, in pieces and in its order; false if it wants no more.
pub type Pieces = Box<dyn FnMut(&[u8]) -> bool + Send>;

/// Our ranks in a trainer's group. Dropping this leaves the group.
pub struct TrainerGroup {
    members: Vec<Member>,
}

/// One rank's thread, which ends when it gets no more work.
struct Member {
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

/// Broadcasts to receive, one after the other.
struct Work {
    broadcasts: Arc<[Broadcast]>,
    /// Takes them on the first rank; on the others they stay unread.
    take: Option<Pieces>,
    patience: Patience,
    done: Sender<Result<()>>,
}

impl TrainerGroup {
    /// Joins with all devices, and waits for all ranks of the group.
    pub(super) fn join(devices: &Devices, id: GroupId, places: Places, patience: &Patience) -> Result<Self> {
        let (joined, results) = channel();
        let members = devices.iter().enumerate().map(|(i, device)| {
            let place = Place { id, rank: places.first + i, world: places.world };
            Member::start(device.clone(), place, patience.clone(), joined.clone())
        });
        let group = Self { members: members.collect::<Result<_>>()? };
        drop(joined);
        all_done(&results, group.members.len(), patience).map(|()| group)
    }

    /// Receives broadcasts of the trainer. Those that `take` does not want any more are received all the same, so that
    /// the trainer comes to its end. For threads that may wait.
    ///
    /// # Errors
    /// `ResourceExhausted` if a device has no memory for one; `DeadlineExceeded` or `Aborted` if one does not come. The
    /// group is of no use any more then.
    pub fn receive(&self, broadcasts: Vec<Broadcast>, take: Pieces, patience: &Patience) -> Result<()> {
        let (done, results) = channel();
        let (broadcasts, mut take) = (Arc::from(broadcasts), Some(take));
        for member in &self.members {
            let work = Work {
                broadcasts: Arc::clone(&broadcasts),
                take: take.take(),
                patience: patience.clone(),
                done: done.clone(),
            };
            member.give(work)?;
        }
        drop(done);
        all_done(&results, self.members.len(), patience)
    }
}

/// Waits for the results of all ranks. After the first error the others give up, and it is the result.
fn all_done(results: &Receiver<Result<()>>, ranks: usize, patience: &Patience) -> Result<()> {
    let (mut first, mut count) = (Ok(()), 0);
    for result in results {
        count += 1;
        if first.is_ok() && result.is_err() {
            patience.end();
            first = result;
        }
    }
    // A rank whose thread has panicked sends none.
    if first.is_ok() && count < ranks {
        return Err(Error::Internal("a thread that receives from the trainer has ended".into()));
    }
    first
}

impl Member {
    fn start(device: Device, place: Place, patience: Patience, joined: Sender<Result<()>>) -> Result<Self> {
        let (work, to_do) = channel();
        let run = move || {
            let feed = {
                let wait = patience.start();
                let feed = device.join_feed(&place, &|| wait.is_over());
                feed.map_err(|error| refusal(error, |why| wait.error("the trainer's group", why)))
            };
            match feed {
                Ok(feed) => {
                    let _ = joined.send(Ok(()));
                    drop(joined);
                    receive_all(feed, &to_do);
                }
                Err(error) => _ = joined.send(Err(error)),
            }
        };
        let thread = std::thread::Builder::new().name(format!("feed-{}", place.rank)).spawn(run);
        let thread = thread.map_err(|e| Error::Internal(format!("a thread for the trainer did not start: {e}")))?;
        Ok(Self { work: Some(work), thread: Some(thread) })
    }

    fn give(&self, work: Work) -> Result<()> {
        let sent = self.work.as_ref().expect("it is there until the drop").send(work);
        sent.map_err(|_| Error::Internal("the thread that receives from the trainer has ended".into()))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.work = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("a thread that receives from a trainer: {}", crate::error::panic_message(&*panic));
        }
    }
}

/// Body of a member's thread once it has joined.
fn receive_all(mut feed: Feed, to_do: &Receiver<Work>) {
    for Work { broadcasts, mut take, patience, done } in to_do {
        let received = broadcasts.iter().try_for_each(|broadcast| receive(&mut feed, *broadcast, &mut take, &patience));
        drop(take);
        feed.release();
        let _ = done.send(received);
    }
}

fn receive(feed: &mut Feed, broadcast: Broadcast, take: &mut Option<Pieces>, patience: &Patience) -> Result<()> {
    let wait = patience.start();
    let mut wanted = true;
    let received = match take {
        Some(pieces) => {
            let mut hand_on = |piece: &[u8]| wanted = wanted && pieces(piece);
            feed.receive(broadcast, Some(&mut hand_on), &|| wait.is_over())
        }
        None => feed.receive(broadcast, None, &|| wait.is_over()),
    };
    if !wanted {
        *take = None;
    }
    let what = format!("a broadcast of {} bytes", broadcast.bytes());
    received.map_err(|error| refusal(error, |why| wait.error(&what, why)))
}

/// What a device says, as an error for the trainer.
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
        let patience = Patience::new(Duration::from_secs(3600));
        let all = |said: &[Result<()>]| {
            let (sender, results) = channel();
            said.iter().for_each(|result| sender.send(result.clone()).expect("it is received"));
            drop(sender);
            all_done(&results, 2, &patience)
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
