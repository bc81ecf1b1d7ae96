//! As much of a store of torch's as one client needs, read off the bytes that torch's own exchanges. The real one is in
//! clients/python/tests/trainers.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

/// Serves one client, which finds `value` as the first broadcast of rank 0. The thread returns what it has added up.
pub fn serve(value: Vec<u8>) -> (u16, JoinHandle<i64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serve = move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut joined = 0;
        loop {
            let mut query = [0];
            if stream.read(&mut query).unwrap_or(0) == 0 {
                return joined;
            }
            match query[0] {
                0 => assert_eq!(number::<4>(&mut stream), 0x3c85_f7ce, "the greeting"),
                13 => {
                    let nonce = number::<4>(&mut stream) as u32;
                    stream.write_all(&nonce.to_le_bytes()).unwrap();
                }
                4 => {
                    assert_eq!(text(&mut stream), "init/");
                    joined += number::<8>(&mut stream) as i64;
                    stream.write_all(&joined.to_le_bytes()).unwrap();
                }
                6 => {
                    assert_eq!(number::<8>(&mut stream), 1, "one key");
                    assert_eq!(text(&mut stream), "/broadcast_from/0/0");
                    stream.write_all(&[0]).unwrap();
                }
                3 => {
                    assert_eq!(text(&mut stream), "/broadcast_from/0/0");
                    stream.write_all(&(value.len() as u64).to_le_bytes()).unwrap();
                    stream.write_all(&value).unwrap();
                }
                other => panic!("query {other}"),
            }
        }
    };
    (port, std::thread::spawn(serve))
}

fn number<const N: usize>(stream: &mut TcpStream) -> u64 {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes[..N]).unwrap();
    u64::from_le_bytes(bytes)
}

fn text(stream: &mut TcpStream) -> String {
    let mut bytes = vec![0; number::<8>(stream) as usize];
    stream.read_exact(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// `pickle.dumps` of vLLM's `ncclUniqueId`, as Python 3.11 writes it.
pub fn pickle(id: &[u8; 128]) -> Vec<u8> {
    let mut pickle = b"\x80\x04\x95\xec\x00\x00\x00\x00\x00\x00\x00\x8c\x07_ctypes\x94\x8c\t_unpickle\x94\x93\x94\
        \x8c4vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94}\x94C\x80"
        .to_vec();
    pickle.extend(id);
    pickle.extend(b"\x94\x86\x94\x86\x94R\x94.");
    pickle
}
