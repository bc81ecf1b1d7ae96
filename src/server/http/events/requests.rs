//! The list of requests, which all feeds share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::engine::{Command, EngineHandle, RequestList};

/// Most requests in the list: a page full.
const MOST: usize = 50;
/// Shortest time between two questions to the engine, however many feeds there are.
const INTERVAL: Duration = Duration::from_secs(1);

/// The list as the engine gave it last, and when.
pub(super) type Answer = Arc<(RequestList, Option<Instant>)>;

/// Asks the engine for the list, one question at a time, without waiting for the answer. Clones share it.
#[derive(Clone)]
pub(super) struct Board {
    answer: watch::Sender<Answer>,
    is_asked: Arc<AtomicBool>,
    /// Shortest time between two questions.
    interval: Duration,
}

impl Default for Board {
    fn default() -> Self {
        Self { answer: watch::Sender::new(Answer::default()), is_asked: Arc::default(), interval: INTERVAL }
    }
}

/// The question that is under way. It ends when the engine answers it or drops it.
struct Question(Arc<AtomicBool>);

impl Drop for Question {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Board {
    /// The last answer. If it is old, the engine is asked for the next one.
    pub(super) fn look(&self, engine: &EngineHandle) -> Answer {
        let answer = self.answer.borrow().clone();
        let is_due = answer.1.is_none_or(|at| at.elapsed() >= self.interval);
        if is_due && !self.is_asked.swap(true, Ordering::AcqRel) {
            let (question, board) = (Question(self.is_asked.clone()), self.answer.clone());
            let reply = Box::new(move |list| {
                board.send_replace(Arc::new((list, Some(Instant::now()))));
                drop(question);
            });
            // A full queue drops the question, and the next look asks again.
            let _ = engine.send(Command::ListRequests { most: MOST, reply });
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A board that asks again after `interval`, and what the engine is sent.
    fn board(interval: Duration) -> (Board, EngineHandle, std::sync::mpsc::Receiver<Command>) {
        let (sender, commands) = std::sync::mpsc::sync_channel(4);
        (Board { interval, ..Board::default() }, EngineHandle::new(sender), commands)
    }

    #[test]
    fn the_engine_is_asked_one_question_at_a_time() {
        let (board, engine, commands) = board(Duration::ZERO);
        assert_eq!(board.look(&engine).0.total, 0);
        // The engine is in a long step: nobody waits for it, and the questions do not pile up.
        board.look(&engine);
        let Ok(Command::ListRequests { most, reply }) = commands.try_recv() else { panic!("a question") };
        assert!(most == MOST && commands.try_recv().is_err());
        reply(RequestList { total: 7, oldest: Vec::new() });
        assert_eq!(board.look(&engine).0.total, 7);
        // A question that is dropped is asked again.
        drop(commands.try_recv().expect("the next question"));
        board.look(&engine);
        assert!(commands.try_recv().is_ok());
    }

    #[test]
    fn the_engine_is_not_asked_while_the_answer_is_new() {
        let (board, engine, commands) = board(Duration::MAX);
        board.look(&engine);
        let Ok(Command::ListRequests { reply, .. }) = commands.try_recv() else { panic!("a question") };
        reply(RequestList::default());
        board.clone().look(&engine);
        assert!(commands.try_recv().is_err());
    }
}
