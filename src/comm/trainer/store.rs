//! A client of torch's TCPStore, which a trainer serves for the rendezvous of its group. It speaks the part of the
//! protocol of torch 2.3 to 2.15 that this needs. Numbers are little-endian; a text is its length in 8 bytes and
//! itself.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::timeout::{TrainerTimeout, TrainerWait};
use crate::error::{Error, Result};

/// `QueryType` of torch.
const VALIDATE: u8 = 0;
const GET: u8 = 3;
const ADD: u8 = 4;
const WAIT: u8 = 6;
const PING: u8 = 13;
/// The first number of a connection.
const MAGIC: u32 = 0x3c85_f7ce;
/// An arbitrary number, which the store returns.
const NONCE: u32 = 0x726f_6c6c;
/// The answer to [`WAIT`] when the key is there.
const STOP_WAITING: u8 = 0;

/// Longest wait for an answer of a machine that may not be there, and time between two attempts.
const CONNECT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(50);
/// How often to check whether the wait is over.
const POLL: Duration = Duration::from_millis(50);

/// A connection to the store.
pub(super) struct Store<'a> {
    stream: TcpStream,
    wait: TrainerWait<'a>,
    name: String,
}

impl<'a> Store<'a> {
    /// Connects, and retries until the trainer listens.
    ///
    /// # Errors
    /// `InvalidArgument` if the name cannot be resolved; `DeadlineExceeded` or `Aborted` if the trainer does not listen
    /// in time, or the listener is not a store.
    pub fn connect(host: &str, port: u16, timeout: &'a TrainerTimeout) -> Result<Self> {
        let (wait, name) = (timeout.start(), format!("the trainer's store at {host}:{port}"));
        let addresses: Vec<_> = (host, port)
            .to_socket_addrs()
            .map_err(|error| Error::invalid("master_address", format!("{host:?} is not an address: {error}")))?
            .collect();
        loop {
            let mut refused = "it has no address".to_owned();
            for address in &addresses {
                match TcpStream::connect_timeout(address, CONNECT) {
                    Ok(stream) => return Self { stream, wait, name }.greet(),
                    Err(error) => refused = error.to_string(),
                }
            }
            if wait.is_over() {
                return Err(wait.error(&name, &refused));
            }
            std::thread::sleep(RETRY);
        }
    }

    fn greet(mut self) -> Result<Self> {
        let limits =
            self.stream.set_read_timeout(Some(POLL)).and_then(|()| self.stream.set_write_timeout(Some(CONNECT)));
        limits.map_err(|error| self.wait.error(&self.name, &error.to_string()))?;
        let mut greeting = vec![VALIDATE];
        greeting.extend(MAGIC.to_le_bytes());
        greeting.push(PING);
        greeting.extend(NONCE.to_le_bytes());
        self.send(&greeting)?;
        if u32::from_le_bytes(self.read()?) != NONCE {
            return Err(Error::Aborted(format!("{}: its answer is not that of torch's TCPStore", self.name)));
        }
        Ok(self)
    }

    /// Adds to the number at `key`, and returns the sum.
    ///
    /// # Errors
    /// If the store does not answer.
    pub fn add(&mut self, key: &str, number: i64) -> Result<i64> {
        let mut query = vec![ADD];
        push_text(&mut query, key);
        query.extend(number.to_le_bytes());
        self.send(&query)?;
        self.read().map(i64::from_le_bytes)
    }

    /// The bytes at `key`, at most `most`. Waits until they are there.
    ///
    /// # Errors
    /// If they do not arrive, or are more.
    pub fn get(&mut self, key: &str, most: usize) -> Result<Vec<u8>> {
        let mut query = vec![WAIT];
        query.extend(1u64.to_le_bytes());
        push_text(&mut query, key);
        self.send(&query)?;
        if self.read()? != [STOP_WAITING] {
            return Err(Error::Aborted(format!("{}: it does not wait for {key}", self.name)));
        }
        query = vec![GET];
        push_text(&mut query, key);
        self.send(&query)?;
        let length = u64::from_le_bytes(self.read()?);
        let Some(length) = usize::try_from(length).ok().filter(|length| *length <= most) else {
            return Err(Error::Aborted(format!(
                "{}: {key} has {length} bytes, {most} at most were expected",
                self.name
            )));
        };
        let mut value = vec![0; length];
        self.read_into(&mut value)?;
        Ok(value)
    }

    fn send(&mut self, query: &[u8]) -> Result<()> {
        self.stream.write_all(query).map_err(|error| self.wait.error(&self.name, &error.to_string()))
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_into(&mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&mut self, mut bytes: &mut [u8]) -> Result<()> {
        while !bytes.is_empty() {
            match self.stream.read(bytes) {
                Ok(0) => return Err(self.wait.error(&self.name, "it has ended the connection")),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) =>
                {
                    if self.wait.is_over() {
                        return Err(self.wait.error(&self.name, "it does not answer"));
                    }
                }
                Err(error) => return Err(self.wait.error(&self.name, &error.to_string())),
            }
        }
        Ok(())
    }
}

fn push_text(query: &mut Vec<u8>, text: &str) {
    query.extend((text.len() as u64).to_le_bytes());
    query.extend(text.as_bytes());
}

#[cfg(test)]
mod tests;
