//! Reports what makes no progress: a step or an order of the engine, or the server's work for a push. It ends nothing.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::stall::{Stall, Work};
use super::{Journal, Metrics, Timeline};
use crate::stacks::{ThreadStack, thread_stacks};

/// Looks in each time after which a report is due: the report is at most a quarter of it late.
const LOOKS: u32 = 4;
/// Longest time between two looks.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Watches the engine, by its timeline, and the pushes in the journal.
pub struct EngineWatchdog {
    timeline: Timeline,
    journal: Journal,
    metrics: Arc<Metrics>,
    limit: Duration,
    /// The work that was reported last and has not gone on.
    reported: Option<Work>,
}

impl EngineWatchdog {
    /// A watchdog for work that makes no progress for `limit`.
    pub fn new(timeline: Timeline, journal: Journal, metrics: Arc<Metrics>, limit: Duration) -> Self {
        Self { timeline, journal, metrics, limit, reported: None }
    }

    /// Looks again and again, and writes reports to the log, in a thread of its own until the process ends.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(mut self) -> std::io::Result<()> {
        let every = (self.limit / LOOKS).min(LONGEST_WAIT);
        let watch = move || loop {
            std::thread::sleep(every);
            if let Some(stall) = self.look(Instant::now()) {
                write(&stall, &thread_stacks());
            }
        };
        std::thread::Builder::new().name("watchdog".into()).spawn(watch).map(drop)
    }

    /// Looks at `now`. Returns work that is to be reported: each is once.
    pub fn look(&mut self, now: Instant) -> Option<Stall> {
        let works: Vec<Work> = self.timeline.work().into_iter().chain(self.journal.works()).collect();
        if let Some(work) = self.reported.take_if(|reported| !works.contains(reported)) {
            self.journal.stall_over(now.saturating_duration_since(work.since));
            tracing::warn!(phase = work.phase.name(), "the work that the watchdog has reported goes on, or has ended");
        }
        if self.reported.is_some() {
            return None;
        }
        let late = works.into_iter().find(|work| now.saturating_duration_since(work.since) >= self.limit)?;
        self.reported = Some(late);
        let Work { phase, push, since } = late;
        let lasted = now.saturating_duration_since(since);
        let stall = Stall { at: SystemTime::now(), phase, push, lasted, is_over: false };
        self.journal.stall(stall.clone());
        self.metrics.stalls.add(1);
        Some(stall)
    }
}

/// Writes a report to the log: the engine's phase, and each thread's stack.
fn write(stall: &Stall, stacks: &[ThreadStack]) {
    let (phase, seconds) = (stall.phase.name(), stall.lasted.as_secs());
    match stall.push {
        Some(push) => tracing::error!(phase, push, "a push has made no progress for {seconds} s"),
        None => tracing::error!(phase, "the engine has made no progress for {seconds} s"),
    }
    if stacks.is_empty() {
        tracing::error!("the stacks of threads cannot be read on this system");
    }
    for ThreadStack { id, name, frames } in stacks {
        tracing::error!("stack of {name} ({id}):\n{frames}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::{Observer, Phase, PushKind, Transport};

    const LIMIT: Duration = Duration::from_secs(60);

    fn watchdog(observer: &Observer) -> EngineWatchdog {
        EngineWatchdog::new(observer.timeline.clone(), observer.journal.clone(), observer.metrics.clone(), LIMIT)
    }

    #[test]
    fn a_step_is_reported_once_and_what_waits_never() {
        let (observer, mut recorder) = Observer::new();
        let mut watchdog = watchdog(&observer);
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(watchdog.look(after(3600)), None, "the model loads");
        recorder.enter(Phase::Idle, after(3600));
        assert_eq!(watchdog.look(after(7200)), None, "there are no requests");
        recorder.enter(Phase::Decode, after(7200));
        assert_eq!(watchdog.look(after(7259)), None);
        let stall = watchdog.look(after(7261)).expect("late");
        assert_eq!((stall.phase, stall.push, stall.is_over), (Phase::Decode, None, false));
        assert_eq!(stall.lasted.as_secs(), 61);
        assert_eq!((watchdog.look(after(7262)), watchdog.look(after(9000))), (None, None), "it is reported");
        assert_eq!(observer.journal.last_stall(), Some(stall.clone()));
        recorder.count_step(after(9001), 1, 1, 0);
        assert_eq!(watchdog.look(after(9002)), None);
        let over = Stall { is_over: true, lasted: Duration::from_secs(9002 - 7200), ..stall };
        assert_eq!(observer.journal.last_stall(), Some(over));
        // Many steps of one phase, none of which is late.
        for i in 0..10 {
            recorder.enter(Phase::Decode, after(9003 + 50 * i));
            assert_eq!(watchdog.look(after(9003 + 50 * i + 49)), None);
        }
        assert!(watchdog.look(after(9003 + 450 + 60)).is_some(), "the next one that hangs is reported again");
        assert_eq!(observer.metrics.stalls.get(), 2);
    }

    #[test]
    fn a_push_is_late_only_while_the_server_works_for_it() {
        let (observer, mut recorder) = Observer::new();
        recorder.enter(Phase::Idle, Instant::now());
        let mut watchdog = watchdog(&observer);
        let push = observer.journal.push();
        push.is(PushKind::Full, Transport::Inline, None);
        push.receives(7);
        let late = || Instant::now() + LIMIT;
        assert_eq!(watchdog.look(late()), None, "its sender is slow");
        let work = push.works(Phase::PushReceive, 7);
        let before = Instant::now() + LIMIT - Duration::from_millis(1);
        work.progress();
        assert_eq!(watchdog.look(before), None, "it is slow, but it goes on");
        let stall = watchdog.look(late()).expect("late");
        assert_eq!((stall.phase, stall.push), (Phase::PushReceive, Some(7)));
        assert_eq!(watchdog.look(late()), None, "it is reported");
        drop(work);
        assert_eq!(watchdog.look(late()), None);
        assert!(observer.journal.last_stall().is_some_and(|stall| stall.is_over));
        let _work = push.works(Phase::PushVerify, 7);
        drop(push);
        assert!(watchdog.look(late()).is_some_and(|stall| stall.phase == Phase::PushVerify), "its sender is gone");
    }
}
