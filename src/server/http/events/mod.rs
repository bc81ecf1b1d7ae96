//! What the page is told: a feed of server-sent events with the state of the server as it changes.
//!
//! Feeds read what observers publish, so that they go on while the engine computes a long step, sleeps, or is being
//! loaded. The list of requests alone is asked of the engine, by all feeds together and without waiting for it.

mod feed;
mod requests;
mod unread;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::{Extension, extract::Request};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::Door;
use super::error::HttpError;
use super::listener::{HangUp, stopped};
use crate::error::{Error, Result};
use crate::server::panics::Panics;
use crate::server::security::Caller;
use feed::Feed;
use requests::Board;
use unread::Unread;

/// Most feeds at the same time: a few pages for each who looks after a server, and far below `--max-connections`.
const MOST_FEEDS: usize = 32;
/// How long a reader must have lagged before a new feed takes its place: one that reads is behind for the moment of a
/// write.
const LEAST_LAG: Duration = Duration::from_secs(1);
/// How fast feeds are.
const PACE: Pace = Pace { tick: Duration::from_millis(500), stall: Duration::from_secs(20) };

/// How fast a feed is, and how slow its reader may be.
#[derive(Clone, Copy)]
struct Pace {
    /// Time between two events: a reader sees a change at once, and a feed costs next to nothing.
    tick: Duration,
    /// How long a reader may leave an event unread. It would hold one of the feeds for ever.
    stall: Duration,
}

/// What all feeds share.
#[derive(Clone)]
pub(super) struct Feeds {
    free: Arc<Semaphore>,
    unread: Unread,
    board: Board,
    stop: watch::Receiver<bool>,
}

impl Feeds {
    /// Feeds that end once `stop` is true.
    pub(super) fn new(stop: watch::Receiver<bool>) -> Self {
        Self { free: Arc::new(Semaphore::new(MOST_FEEDS)), unread: Unread::default(), board: Board::default(), stop }
    }

    /// The place of a new feed. If there is none left, the feed that has been unread for longest gives its own, if that
    /// was for [`LEAST_LAG`].
    ///
    /// # Errors
    /// `ResourceExhausted` if no feed has been unread for so long.
    async fn place(&self) -> Result<OwnedSemaphorePermit> {
        if let Ok(place) = self.free.clone().try_acquire_owned() {
            return Ok(place);
        }
        if !self.unread.hang_up_oldest(LEAST_LAG) {
            let message = format!("{MOST_FEEDS} feeds are open, the most there may be; close a page and try again");
            return Err(Error::ResourceExhausted(message));
        }
        // The place comes back with the connection that ends.
        Ok(self.free.clone().acquire_owned().await.expect("the semaphore is never closed"))
    }
}

/// The state of the server as server-sent events, two a second. Made for the page, whose needs decide its shape.
///
/// Each event is a JSON object. `now`, in nanoseconds since `server.started`, and the new spans of the timeline are in
/// each, every other member only if it differs from what was sent before.
pub(super) async fn events(
    State(door): State<Door>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> std::result::Result<Response, HttpError> {
    let feeds = door.feeds.clone();
    let hang_up = request.extensions().get::<HangUp>().cloned().unwrap_or_default();
    let place = feeds.place().await?;
    // One event, so that a reader that stops holds no more.
    let (sender, receiver) = mpsc::channel(1);
    let feed = Feed::new(&door.gate, feeds.board, caller);
    tokio::spawn(run(feed, sender, (feeds.stop, door.gate.panics.clone()), (hang_up, feeds.unread), PACE));
    let body = Body::from_stream(ReceiverStream::new(receiver).map(move |event: Bytes| {
        let _: &OwnedSemaphorePermit = &place;
        Ok::<_, std::convert::Infallible>(event)
    }));
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-store")];
    Ok((StatusCode::OK, headers, body).into_response())
}

/// Gives the feed's events to its reader until the reader goes or stops to read, or the server ends.
async fn run(
    mut feed: Feed,
    sender: mpsc::Sender<Bytes>,
    (mut stop, panics): (watch::Receiver<bool>, Panics),
    (hang_up, unread): (HangUp, Unread),
    pace: Pace,
) {
    let mut ticks = interval(pace.tick);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = sender.closed() => return,
            () = stopped(&mut stop) => return end(&sender, &hang_up),
        }
        loop {
            // A panic ends this feed alone.
            let Ok((event, has_more)) = panics.catch(|| feed.next()) else { return };
            tokio::select! {
                sent = sender.send(event) => if sent.is_err() { return },
                () = stopped(&mut stop) => return end(&sender, &hang_up),
                () = stalled(&unread, &hang_up, pace) => return end(&sender, &hang_up),
            }
            if !has_more {
                break;
            }
        }
    }
}

/// Returns once an event has been unread for too long. From the next event on its feed may have to give way.
async fn stalled(unread: &Unread, hang_up: &HangUp, pace: Pace) {
    sleep(pace.tick).await;
    let _unread = unread.note(hang_up);
    sleep(pace.stall.saturating_sub(pace.tick)).await;
}

/// Ends a feed, and the connection with it if its reader has left an event unread: the rest would wait for it.
fn end(sender: &mpsc::Sender<Bytes>, hang_up: &HangUp) {
    if sender.capacity() == 0 {
        hang_up.hang_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Observer;
    use crate::server::gate::gate;

    const FAST: Pace = Pace { tick: Duration::from_millis(1), stall: Duration::from_millis(50) };
    const PATIENT: Pace = Pace { stall: Duration::from_secs(3600), ..FAST };

    /// A feed with its reader's end, what stops it, and what it hangs up.
    fn feed(
        pace: Pace,
        unread: &Unread,
    ) -> (mpsc::Receiver<Bytes>, watch::Sender<bool>, HangUp, tokio::task::JoinHandle<()>) {
        let (observer, _recorder) = Observer::new();
        let (_keeper, gate) = gate(observer);
        let (sender, receiver) = mpsc::channel(1);
        let (stop, stopped) = watch::channel(false);
        let (hang_up, feed) = (HangUp::default(), Feed::new(&gate, Board::default(), Caller::default()));
        let running = tokio::spawn(run(feed, sender, (stopped, gate.panics), (hang_up.clone(), unread.clone()), pace));
        (receiver, stop, hang_up, running)
    }

    #[tokio::test]
    async fn a_reader_that_stops_is_hung_up_on() {
        let (mut receiver, _stop, hang_up, running) = feed(FAST, &Unread::default());
        assert!(receiver.recv().await.is_some());
        hang_up.asked().await;
        running.await.expect("no panic");
        assert!(receiver.recv().await.is_some(), "the event that it has not read");
        assert_eq!(receiver.recv().await, None);
    }

    #[tokio::test]
    async fn a_feed_ends_with_its_reader_and_with_the_server() {
        let (receiver, _stop, _, running) = feed(PATIENT, &Unread::default());
        drop(receiver);
        running.await.expect("no panic");

        // Somebody reads, or nobody does: then the connection would keep the server from ending.
        let (mut receiver, stop, _, running) = feed(PATIENT, &Unread::default());
        let reader = tokio::spawn(async move { while receiver.recv().await.is_some() {} });
        stop.send_replace(true);
        running.await.expect("no panic");
        reader.await.expect("no panic");

        let (receiver, stop, hang_up, running) = feed(PATIENT, &Unread::default());
        while receiver.is_empty() {
            tokio::task::yield_now().await;
        }
        stop.send_replace(true);
        hang_up.asked().await;
        running.await.expect("no panic");
    }

    #[tokio::test]
    async fn the_feed_that_has_been_unread_for_longest_gives_way() {
        let (_stop, stopped) = watch::channel(false);
        let feeds = Feeds::new(stopped);
        let mut places = Vec::new();
        for _ in 0..MOST_FEEDS {
            places.push(feeds.place().await.expect("a place"));
        }
        let (mut read, _stop, _, _running) = feed(PATIENT, &feeds.unread);
        tokio::spawn(async move { while read.recv().await.is_some() {} });
        assert!(matches!(feeds.place().await, Err(Error::ResourceExhausted(_))), "all are read");

        let (receiver, _stop, hang_up, running) = feed(PATIENT, &feeds.unread);
        let place = loop {
            // Its connection ends, and drops the place.
            let connection = async {
                hang_up.asked().await;
                places.pop();
                std::future::pending::<()>().await
            };
            tokio::select! {
                place = feeds.place() => if let Ok(place) = place { break place },
                () = connection => {}
            }
            tokio::task::yield_now().await;
        };
        assert_eq!((places.len(), feeds.free.available_permits()), (MOST_FEEDS - 1, 0));
        drop((place, receiver));
        running.await.expect("no panic");
    }
}
