//! Calls that wait for an answer, and closures that take it.

use std::sync::{Arc, Mutex};

use rollout_server::engine::{CancelFlag, Reply};

use super::book::{Book, Note};
use super::world::World;

/// A call, until it is answered.
pub struct Call {
    pub name: &'static str,
    /// Set if its caller is gone; its reply may be dropped then.
    pub cancel: CancelFlag,
    /// The turn before which it was sent.
    pub sent: u64,
    is_open: bool,
    /// Whether its command was not sent, or may not have been looked at.
    is_withdrawn: bool,
}

#[derive(Default)]
pub struct Calls {
    calls: Vec<Call>,
    num_open: usize,
}

impl Calls {
    pub fn open(&mut self, call: Call) -> usize {
        self.calls.push(call);
        self.num_open += 1;
        self.calls.len() - 1
    }

    pub fn close(&mut self, call: usize) {
        let call = &mut self.calls[call];
        assert!(call.is_open, "{} is answered twice", call.name);
        call.is_open = false;
        self.num_open -= 1;
    }

    /// A reply was dropped: its caller must be gone.
    pub fn close_unanswered(&mut self, call: usize) {
        let Call { name, cancel, is_withdrawn, .. } = &self.calls[call];
        assert!(*is_withdrawn || cancel.is_cancelled(), "{name} gets no answer");
        self.close(call);
    }

    /// The command of a call was not sent.
    pub fn withdraw(&mut self, call: usize) {
        self.calls[call].is_withdrawn = true;
    }

    /// The engine has died while it took the commands that were sent from turn `sent` on.
    pub fn excuse(&mut self, sent: u64) {
        self.calls.iter_mut().rev().take_while(|call| call.sent >= sent).for_each(|call| call.is_withdrawn = true);
    }

    pub fn num_open(&self) -> usize {
        self.num_open
    }

    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Flags of the calls that wait, the newest last.
    pub fn waiting(&self) -> Vec<CancelFlag> {
        let newest = self.calls.iter().rev().take(50).filter(|call| call.is_open);
        newest.map(|call| call.cancel.clone()).collect()
    }

    /// After the engine has ended, all calls that it has taken have an answer.
    pub fn check_end(&self, taken: impl Fn(u64) -> bool) {
        let left = self.calls.iter().find(|call| call.is_open && taken(call.sent) && !call.cancel.is_cancelled());
        assert!(left.is_none(), "{} has no answer", left.map_or("", |call| call.name));
    }
}

/// Tells the book if the reply is dropped.
struct Guard {
    book: Arc<Mutex<Book>>,
    call: usize,
    is_answered: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.is_answered
            && let Ok(mut book) = self.book.lock()
        {
            book.notes.push(Note::ReplyDropped(self.call));
        }
    }
}

impl World {
    /// A closure for the answer to a call. `note` takes it first, into the book.
    pub fn reply<T: 'static>(
        &mut self,
        name: &'static str,
        cancel: &CancelFlag,
        note: impl FnOnce(&mut Book, T) + Send + 'static,
    ) -> (usize, Reply<T>) {
        let call =
            self.next_call(Call { name, cancel: cancel.clone(), sent: self.turn, is_open: true, is_withdrawn: false });
        let guard = Guard { book: self.book.clone(), call, is_answered: false };
        let reply = Box::new(move |value| {
            let mut guard = guard;
            let book = guard.book.clone();
            let book = &mut *book.lock().unwrap();
            note(book, value);
            book.notes.push(Note::Answered(guard.call));
            guard.is_answered = true;
        });
        (call, reply)
    }

    /// Sends a command that is answered.
    pub fn call<T: 'static>(
        &mut self,
        name: &'static str,
        cancel: &CancelFlag,
        command: impl FnOnce(Reply<T>) -> rollout_server::engine::Command,
        note: impl FnOnce(&mut Book, T) + Send + 'static,
    ) -> bool {
        let (call, reply) = self.reply(name, cancel, note);
        let is_sent = self.send(command(reply));
        if !is_sent {
            self.calls.withdraw(call);
        }
        is_sent
    }
}
