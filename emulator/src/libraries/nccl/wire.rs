//! Ranks in other processes. The process that made an id listens; a rank elsewhere has one connection to it, on which
//! each request is answered before the next.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use super::super::number::ElementType;
use super::hub::{Collective, CollectiveError, CollectiveKind, Hub};

const KINDS: [CollectiveKind; 5] = [
    CollectiveKind::AllReduce,
    CollectiveKind::Reduce,
    CollectiveKind::Broadcast,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
];

/// A rank's request to the hub.
#[derive(PartialEq, Debug)]
pub enum Request {
    WaitForAll,
    Collective(Collective, Vec<u8>),
    Send(usize, Vec<u8>),
    Receive(usize),
}

/// Element types by their `ncclDataType_t`.
pub fn type_of(code: u8) -> Option<ElementType> {
    const TYPES: [ElementType; 10] = [
        ElementType::I8,
        ElementType::U8,
        ElementType::I32,
        ElementType::U32,
        ElementType::I64,
        ElementType::U64,
        ElementType::F16,
        ElementType::F32,
        ElementType::F64,
        ElementType::Bf16,
    ];
    TYPES.get(usize::from(code)).copied()
}

fn code_of(ty: ElementType) -> u8 {
    (0..).find(|&code| type_of(code) == Some(ty)).expect("each type has its code")
}

fn write_number(to: &mut impl Write, number: u64) -> io::Result<()> {
    to.write_all(&number.to_le_bytes())
}

fn read_number(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn write_data(to: &mut impl Write, data: &[u8]) -> io::Result<()> {
    write_number(to, data.len() as u64)?;
    to.write_all(data)
}

fn read_data(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut data = vec![0; read_number(from)? as usize];
    from.read_exact(&mut data)?;
    Ok(data)
}

impl Request {
    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Self::WaitForAll => write_number(to, 0),
            Self::Collective(call, data) => {
                let kind = KINDS.iter().position(|kind| *kind == call.kind).expect("each kind is listed");
                write_number(to, 1)?;
                let (ty, is_captured) = (u64::from(code_of(call.ty)), call.is_captured.into());
                for number in [kind as u64, call.count, ty, call.op.into(), call.root.into(), call.index, is_captured] {
                    write_number(to, number)?;
                }
                write_data(to, data)
            }
            Self::Send(rank, data) => {
                write_number(to, 2)?;
                write_number(to, *rank as u64)?;
                write_data(to, data)
            }
            Self::Receive(rank) => {
                write_number(to, 3)?;
                write_number(to, *rank as u64)
            }
        }
    }

    fn read(from: &mut impl Read) -> io::Result<Self> {
        let wrong = || io::Error::from(io::ErrorKind::InvalidData);
        Ok(match read_number(from)? {
            0 => Self::WaitForAll,
            1 => {
                let kind = *KINDS.get(read_number(from)? as usize).ok_or_else(wrong)?;
                let count = read_number(from)?;
                let ty = type_of(read_number(from)? as u8).ok_or_else(wrong)?;
                let (op, root) = (read_number(from)? as u8, read_number(from)? as u32);
                let (index, is_captured) = (read_number(from)?, read_number(from)? != 0);
                Self::Collective(Collective { kind, count, ty, op, root, index, is_captured }, read_data(from)?)
            }
            2 => Self::Send(read_number(from)? as usize, read_data(from)?),
            3 => Self::Receive(read_number(from)? as usize),
            _ => return Err(wrong()),
        })
    }

    /// Does what a rank asks for.
    pub fn answer(self, hub: &Hub, rank: usize) -> Result<Vec<u8>, CollectiveError> {
        match self {
            Self::WaitForAll => hub.wait_for_all(rank).map(|()| Vec::new()),
            Self::Collective(call, data) => hub.collective(rank, call, data),
            Self::Send(to, data) => {
                hub.send(rank, to, data);
                Ok(Vec::new())
            }
            Self::Receive(from) => hub.receive(rank, from),
        }
    }
}

/// The hubs of the ids that this process has made, by their number.
static HUBS: LazyLock<Mutex<HashMap<u64, Arc<Hub>>>> = LazyLock::new(Mutex::default);

/// The hub of an id, which the first rank to come makes.
pub fn hub(number: u64, ranks: usize) -> Arc<Hub> {
    HUBS.lock().unwrap().entry(number).or_insert_with(|| Hub::new(ranks)).clone()
}

/// The port on which this process listens for ranks of others.
pub fn listen() -> io::Result<u16> {
    static PORT: OnceLock<u16> = OnceLock::new();
    if let Some(port) = PORT.get() {
        return Ok(*port);
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::Builder::new().name("nccl".into()).spawn(move || {
        for connection in listener.incoming().flatten() {
            std::thread::spawn(move || serve(connection));
        }
    })?;
    Ok(*PORT.get_or_init(|| port))
}

/// Serves a rank of another process until its connection ends.
fn serve(mut connection: TcpStream) -> io::Result<()> {
    connection.set_nodelay(true)?;
    let (number, ranks, rank) =
        (read_number(&mut connection)?, read_number(&mut connection)? as usize, read_number(&mut connection)? as usize);
    let hub = hub(number, ranks);
    let fits = hub.ranks == ranks && rank < ranks;
    write_number(&mut connection, u64::from(fits))?;
    if !fits {
        return Ok(());
    }
    hub.join();
    // Requests are read beside the work on them, so that the end of the connection is seen while the rank waits.
    let (requests, to_do) = channel();
    let (mut answers, own) = (connection.try_clone()?, hub.clone());
    std::thread::spawn(move || {
        for request in to_do {
            let answer: Result<Vec<u8>, CollectiveError> = Request::answer(request, &own, rank);
            let written = match &answer {
                Ok(data) => write_number(&mut answers, 1).and_then(|()| write_data(&mut answers, data)),
                Err(_) => write_number(&mut answers, 0),
            };
            if written.is_err() {
                return;
            }
        }
    });
    while let Ok(request) = Request::read(&mut connection) {
        if requests.send(request).is_err() {
            break;
        }
    }
    hub.lose(rank);
    Ok(())
}

/// A rank's connection to the process that has its hub.
pub struct HubConnection(TcpStream);

impl HubConnection {
    /// # Errors
    /// If the process does not listen, or its number of ranks differs.
    pub fn open(port: u16, number: u64, ranks: usize, rank: usize) -> io::Result<Self> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        for number in [number, ranks as u64, rank as u64] {
            write_number(&mut stream, number)?;
        }
        match read_number(&mut stream)? {
            1 => Ok(Self(stream)),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Asks, and waits for the answer. One request at a time.
    ///
    /// # Errors
    /// Where the connection has ended.
    pub fn ask(&self, request: &Request) -> io::Result<Result<Vec<u8>, CollectiveError>> {
        let mut bytes = Vec::new();
        request.write(&mut bytes)?;
        (&self.0).write_all(&bytes)?;
        match read_number(&mut &self.0)? {
            1 => Ok(Ok(read_data(&mut &self.0)?)),
            _ => Ok(Err(CollectiveError::Disagreement)),
        }
    }

    /// Ends the connection, and the request that waits.
    pub fn close(&self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_as_they_were_sent() {
        let (kind, ty) = (CollectiveKind::ReduceScatter, ElementType::Bf16);
        let call = Collective { kind, count: 7, ty, op: 4, root: 3, index: 9, is_captured: true };
        let requests = [
            Request::WaitForAll,
            Request::Collective(call, vec![1, 2, 3]),
            Request::Send(2, vec![4]),
            Request::Receive(1),
        ];
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.write(&mut bytes).unwrap());
        let mut rest = &bytes[..];
        for request in requests {
            assert_eq!(Request::read(&mut rest).unwrap(), request);
        }
        assert!(rest.is_empty());
    }
}
