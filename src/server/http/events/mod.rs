//! `/events`: feeds of server-sent events with the state of the server as it changes, for the page.
//!
//! Feeds read the published metrics, so that they continue while the engine computes a long step, sleeps, or loads. The
//! list of requests alone comes from the engine, which all feeds together ask, without waiting for it.

mod feed;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::error::{Error, Result};
use crate::server::http::{AppState, HttpResult};
use crate::server::security::Caller;
use crate::server::state::Panics;
use feed::{Feed, RequestListCache};

/// Most feeds at the same time: a few pages for each operator of a server, and far below `--max-connections`.
const MOST_FEEDS: usize = 32;
/// How long a reader must have lagged before a new feed takes its place: any reader lags for the moment of a write.
const LEAST_LAG: Duration = Duration::from_secs(1);
/// How fast feeds are.
const PACE: Pace = Pace { tick: Duration::from_millis(500), stall: Duration::from_secs(20) };

/// How fast a feed is, and how slow its reader may be.
#[derive(Clone, Copy)]
struct Pace {
    /// Time between two events: a reader sees a change at once, and a feed costs next to nothing.
    tick: Duration,
    /// How long a reader may leave an event unread. Without a limit it would hold one of the feeds forever.
    stall: Duration,
}

/// The state that all feeds share.
#[derive(Clone)]
pub(super) struct Feeds {
    free: Arc<Semaphore>,
    unread: Unread,
    requests: RequestListCache,
    stop: CancellationToken,
}

impl Feeds {
    /// Feeds that end once `stop` is cancelled.
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self {
            free: Arc::new(Semaphore::new(MOST_FEEDS)),
            unread: Unread::default(),
            requests: RequestListCache::default(),
            stop,
        }
    }

    /// The permit of a new feed. If there is none left, the feed that has been unread for longest is closed, if that
    /// was for [`LEAST_LAG`].
    ///
    /// # Errors
    /// `ResourceExhausted` if no feed has been unread for so long.
    async fn acquire(&self) -> Result<OwnedSemaphorePermit> {
        if let Ok(permit) = self.free.clone().try_acquire_owned() {
            return Ok(permit);
        }
        if !self.unread.hang_up_oldest(LEAST_LAG) {
            let message = format!("{MOST_FEEDS} feeds are open, the most there may be; close a page and try again");
            return Err(Error::ResourceExhausted(message));
        }
        // The permit comes back when that connection ends.
        Ok(self.free.clone().acquire_owned().await.expect("the semaphore is never closed"))
    }
}

/// The feeds whose readers have left an event unread, the longest first. Clones share them.
#[derive(Clone, Default)]
struct Unread(watch::Sender<Vec<Weak<Lag>>>);

/// A reader leaves an event unread for as long as its feed holds this.
struct Lag {
    since: Instant,
    connection: CancellationToken,
}

impl Unread {
    /// Notes that the reader at the other end of `connection` lags, until the note is dropped.
    fn note(&self, connection: &CancellationToken) -> Arc<Lag> {
        let lag = Arc::new(Lag { since: Instant::now(), connection: connection.clone() });
        self.0.send_modify(|lags| {
            lags.retain(|lag| lag.strong_count() > 0);
            lags.push(Arc::downgrade(&lag));
        });
        lag
    }

    /// Closes the connection whose reader has lagged for longest; false if none has lagged for `least`.
    fn hang_up_oldest(&self, least: Duration) -> bool {
        self.0.send_if_modified(|lags| {
            lags.retain(|lag| lag.strong_count() > 0);
            let Some(oldest) = lags.first().and_then(Weak::upgrade) else { return false };
            let has_lagged = oldest.since.elapsed() >= least;
            if has_lagged {
                oldest.connection.cancel();
                lags.remove(0);
            }
            has_lagged
        })
    }
}

/// The state of the server as server-sent events, two a second. Made for the page, whose needs decide its shape.
///
/// Each event is a JSON object. `now`, in nanoseconds since `server.started`, and the new spans of the timeline are in
/// each, every other member only if it differs from the value that was sent before.
pub(super) async fn events(
    State(app): State<AppState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> HttpResult<Response> {
    let hang_up = request.extensions().get::<CancellationToken>().cloned().unwrap_or_default();
    let permit = app.feeds.acquire().await?;
    // One event, so that a reader that stops holds no more.
    let (sender, receiver) = mpsc::channel(1);
    let feed = Feed::new(&app.server, app.feeds.requests.clone(), caller);
    tokio::spawn(FeedSender { sender, hang_up, feeds: app.feeds, panics: app.server.panics, pace: PACE }.run(feed));
    let body = Body::from_stream(ReceiverStream::new(receiver).map(move |event: Bytes| {
        let _: &OwnedSemaphorePermit = &permit;
        Ok::<_, std::convert::Infallible>(event)
    }));
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-store")];
    Ok((headers, body).into_response())
}

/// Sends events to the reader of one feed.
struct FeedSender {
    sender: mpsc::Sender<Bytes>,
    /// Closes the reader's connection.
    hang_up: CancellationToken,
    feeds: Feeds,
    panics: Panics,
    pace: Pace,
}

impl FeedSender {
    /// Sends the feed's events until the reader leaves or stops reading, or the server ends.
    async fn run(self, mut feed: Feed) {
        let mut ticks = interval(self.pace.tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.sender.closed() => return,
                () = self.feeds.stop.cancelled() => return self.end(),
            }
            loop {
                // A panic ends this feed alone.
                let Ok((event, has_more)) = self.panics.catch(|| feed.next()) else { return };
                tokio::select! {
                    sent = self.sender.send(event) => if sent.is_err() { return },
                    () = self.feeds.stop.cancelled() => return self.end(),
                    () = self.stalled() => return self.end(),
                }
                if !has_more {
                    break;
                }
            }
        }
    }

    /// Returns once an event has been unread for too long. After one tick its feed may be closed for a new one.
    async fn stalled(&self) {
        sleep(self.pace.tick).await;
        let _unread = self.feeds.unread.note(&self.hang_up);
        sleep(self.pace.stall.saturating_sub(self.pace.tick)).await;
    }

    /// Ends the feed, and the connection with it if the reader has left an event unread: the rest would wait for it.
    fn end(&self) {
        if self.sender.capacity() == 0 {
            self.hang_up.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Observer;
    use crate::server::state::ServerState;

    const FAST: Pace = Pace { tick: Duration::from_millis(1), stall: Duration::from_millis(50) };
    const PATIENT: Pace = Pace { stall: Duration::from_secs(3600), ..FAST };

    /// A feed with its reader's end, what stops it, and what it hangs up.
    fn feed(
        pace: Pace,
        unread: &Unread,
    ) -> (mpsc::Receiver<Bytes>, CancellationToken, CancellationToken, tokio::task::JoinHandle<()>) {
        let (observer, _recorder) = Observer::new();
        let (_stage, server) = ServerState::new(observer);
        let (sender, receiver) = mpsc::channel(1);
        let stop = CancellationToken::new();
        let (hang_up, feed) =
            (CancellationToken::default(), Feed::new(&server, RequestListCache::default(), Caller::default()));
        let feeds = Feeds { unread: unread.clone(), ..Feeds::new(stop.clone()) };
        let sender = FeedSender { sender, hang_up: hang_up.clone(), feeds, panics: server.panics, pace };
        let running = tokio::spawn(sender.run(feed));
        (receiver, stop, hang_up, running)
    }

    #[tokio::test]
    async fn a_reader_that_stops_is_hung_up_on() {
        let (mut receiver, _stop, hang_up, running) = feed(FAST, &Unread::default());
        assert!(receiver.recv().await.is_some());
        hang_up.cancelled().await;
        running.await.expect("no panic");
        assert!(receiver.recv().await.is_some(), "the event that it has not read");
        assert_eq!(receiver.recv().await, None);
    }

    #[tokio::test]
    async fn a_feed_ends_with_its_reader_and_with_the_server() {
        let (receiver, _stop, _, running) = feed(PATIENT, &Unread::default());
        drop(receiver);
        running.await.expect("no panic");

        // With a reader that reads, and with one that does not: its connection would keep the server from ending.
        let (mut receiver, stop, _, running) = feed(PATIENT, &Unread::default());
        let reader = tokio::spawn(async move { while receiver.recv().await.is_some() {} });
        stop.cancel();
        running.await.expect("no panic");
        reader.await.expect("no panic");

        let (receiver, stop, hang_up, running) = feed(PATIENT, &Unread::default());
        while receiver.is_empty() {
            tokio::task::yield_now().await;
        }
        stop.cancel();
        hang_up.cancelled().await;
        running.await.expect("no panic");
    }

    #[tokio::test]
    async fn the_feed_that_has_been_unread_for_longest_is_closed() {
        let feeds = Feeds::new(CancellationToken::new());
        let mut permits = Vec::new();
        for _ in 0..MOST_FEEDS {
            permits.push(feeds.acquire().await.expect("a permit"));
        }
        let (mut read, _stop, _, _running) = feed(PATIENT, &feeds.unread);
        tokio::spawn(async move { while read.recv().await.is_some() {} });
        assert!(matches!(feeds.acquire().await, Err(Error::ResourceExhausted(_))), "all are read");

        let (receiver, _stop, hang_up, running) = feed(PATIENT, &feeds.unread);
        let permit = loop {
            // Its connection ends, and drops the permit.
            let connection = async {
                hang_up.cancelled().await;
                permits.pop();
                std::future::pending::<()>().await
            };
            tokio::select! {
                permit = feeds.acquire() => if let Ok(permit) = permit { break permit },
                () = connection => {}
            }
            tokio::task::yield_now().await;
        };
        assert_eq!((permits.len(), feeds.free.available_permits()), (MOST_FEEDS - 1, 0));
        drop((permit, receiver));
        running.await.expect("no panic");
    }

    #[tokio::test]
    async fn the_oldest_gives_way_and_only_if_it_is_still_unread() {
        let unread = Unread::default();
        assert!(!unread.hang_up_oldest(Duration::ZERO), "all are read");
        let [first, second, third] = std::array::from_fn(|_| CancellationToken::new());
        let read = unread.note(&first);
        let (_second, _third) = (unread.note(&second), unread.note(&third));
        drop(read);
        assert!(!unread.hang_up_oldest(Duration::from_secs(3600)), "neither has lagged for so long");
        assert!(unread.clone().hang_up_oldest(Duration::ZERO));
        second.cancelled().await;
        assert!(unread.hang_up_oldest(Duration::ZERO));
        third.cancelled().await;
        assert!(!unread.hang_up_oldest(Duration::ZERO));
    }
}
