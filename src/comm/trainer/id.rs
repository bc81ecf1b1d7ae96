//! The id of a group, as vLLM's trainer publishes it: the pickle of a ctypes structure of 128 bytes. A pickle is a
//! program, which is not run here: these are the bytes of that one program, or they are refused.

/// The first opcode and, behind a protocol's number, the length of the rest.
const PROTO: u8 = 0x80;
const FRAME: u8 = 0x95;
/// Protocols that write the same: 4 is Python's default before 3.14, 5 from then on.
const PROTOCOLS: [u8; 2] = [4, 5];
/// `_ctypes._unpickle(ncclUniqueId, ({}, <bytes>))` up to the bytes, and their length.
const BEFORE: &[u8] = b"\x8c\x07_ctypes\x94\x8c\x09_unpickle\x94\x93\x94\
    \x8c\x34vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94}\x94C\x80";
const AFTER: &[u8] = b"\x94\x86\x94\x86\x94R\x94.";
const ID_BYTES: usize = 128;

/// The id in a pickle; `None` if it is anything else.
pub(super) fn from_pickle(pickle: &[u8]) -> Option<[u8; ID_BYTES]> {
    let rest = pickle.strip_prefix(&[PROTO])?;
    let rest = rest.strip_prefix(&[*rest.first().filter(|protocol| PROTOCOLS.contains(protocol))?, FRAME])?;
    let (length, rest) = rest.split_first_chunk()?;
    if u64::from_le_bytes(*length) != rest.len() as u64 {
        return None;
    }
    let (id, rest) = rest.strip_prefix(BEFORE)?.split_first_chunk()?;
    (rest == AFTER).then_some(*id)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python 3.11's output for the bytes 100 to 227: `pickle.dumps(ncclUniqueId.from_buffer_copy(bytes(...)))`.
    fn recorded() -> Vec<u8> {
        let mut pickle = b"\x80\x04\x95\xec\x00\x00\x00\x00\x00\x00\x00\x8c\x07_ctypes\x94\x8c\t_unpickle\x94\x93\x94\
            \x8c4vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94}\x94C\x80"
            .to_vec();
        pickle.extend(100..228);
        pickle.extend(b"\x94\x86\x94\x86\x94R\x94.");
        pickle
    }

    #[test]
    fn the_id_is_read_and_nothing_else() {
        let pickle = recorded();
        let expected: Vec<u8> = (100..228).collect();
        assert_eq!(from_pickle(&pickle).expect("an id")[..], expected);
        let mut newer = pickle.clone();
        newer[1] = 5;
        assert_eq!(from_pickle(&newer).expect("an id")[..], expected);
        for at in (0..pickle.len()).filter(|at| !(pickle.len() - 136..pickle.len() - 8).contains(at)) {
            let mut other = pickle.clone();
            other[at] ^= 2;
            assert_eq!(from_pickle(&other), None, "byte {at} is another");
        }
        for length in 0..pickle.len() {
            assert_eq!(from_pickle(&pickle[..length]), None, "{length} bytes");
        }
        assert_eq!(from_pickle(&[&pickle[..], b"."].concat()), None, "a byte more");
        assert_eq!(from_pickle(b"cos\nsystem\n(S'true'\ntR."), None);
    }
}
