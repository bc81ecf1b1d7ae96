//! Several processes with one device.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use crate::device::*;

/// Says which part of a test a process plays.
const PART: &str = "CUEMU_TEST_PART";

#[expect(clippy::disallowed_methods, reason = "a test that runs once more is told its part")]
pub fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// Another process that plays a part of a test. Lines go to and fro.
pub struct Actor(Child, BufReader<std::process::ChildStdout>);

impl Actor {
    pub fn start(test: &str, part: &str, settings: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("the test's path"));
        command.args(["--exact", test, "--nocapture"]).env(PART, part).envs(settings.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the test runs once more");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Self(child, lines)
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.0.stdin.as_mut().expect("a pipe"), "{line}").expect("the other process listens");
    }

    /// The next line that it says to the test.
    pub fn hear(&mut self) -> String {
        for line in self.1.by_ref().lines().map_while(Result::ok) {
            if let Some((_, text)) = line.split_once("says: ") {
                return text.to_owned();
            }
        }
        panic!("the other process ended without a word")
    }

    pub fn end(mut self) {
        drop(self.0.stdin.take());
        let mut rest = String::new();
        self.1.read_to_string(&mut rest).expect("text");
        assert!(self.0.wait().expect("it ends").success(), "{rest}");
    }

    /// Ends it without leave.
    pub fn kill(mut self) {
        self.0.kill().expect("it was running");
        self.0.wait().expect("it ends");
    }
}

/// Says a line to the test that started this process.
pub fn say(text: &str) {
    println!("says: {text}");
}

/// The next line of the test that started this process.
pub fn listen() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("text");
    line.trim().to_owned()
}

fn to_text(handle: &IpcHandle) -> String {
    // SAFETY: a handle is 64 bytes.
    let words = unsafe { &*std::ptr::from_ref(handle).cast::<[u64; 8]>() };
    words.map(|word| word.to_string()).join(" ")
}

fn to_handle(text: &str) -> IpcHandle {
    let words = text.split(' ').map(|word| word.parse().expect("a number")).collect::<Vec<u64>>();
    let words: [u64; 8] = words.try_into().expect("eight words");
    // SAFETY: a handle is 64 bytes.
    unsafe { std::mem::transmute(words) }
}

fn export(at: u64) -> (i32, IpcHandle) {
    let mut handle = to_handle("0 0 0 0 0 0 0 0");
    // SAFETY: the pointer is valid.
    (unsafe { cuIpcGetMemHandle(&raw mut handle, at) }, handle)
}

fn import(text: &str) -> Result<u64, i32> {
    let mut at = 0;
    // SAFETY: the pointer is valid.
    match unsafe { cuIpcOpenMemHandle_v2(&raw mut at, to_handle(text), 1) } {
        0 => Ok(at),
        code => Err(code),
    }
}

#[test]
fn memory_is_shared_by_handle() {
    const TEST: &str = "processes::memory_is_shared_by_handle";
    if part().is_some() {
        open(0);
        let text = listen();
        let at = import(&text).unwrap();
        assert_eq!(import(&text), Ok(at), "one address, however often it is opened");
        say(&format!("{:?}", download(at, 3).unwrap()));
        ok(launch(function("increment"), 1, 32, at, 3, 0));
        ok(synchronize(0));
        say("incremented");
        listen();
        say(&format!("{}", download(at, 1).unwrap()[0].is_nan()));
        // SAFETY: the address is open.
        unsafe {
            ok(cuIpcCloseMemHandle(at));
            assert_eq!(download(at, 3).map(|x| x.len()), Ok(3), "it was opened twice");
            ok(cuIpcCloseMemHandle(at));
        }
        assert_eq!(download(at, 3), Err(1));
        return;
    }
    open(0);
    let at = upload(&[1.0, 2.0, 3.0]);
    let (code, handle) = export(at);
    ok(code);
    assert_eq!(import(&to_text(&handle)), Err(201), "no process opens its own handle");
    // SAFETY: the pointer is valid.
    let pooled = get(|out| unsafe { cuMemAllocAsync(out, 8, 0) });
    assert_eq!(export(pooled).0, 1, "memory of a pool has no handle");
    let mut other = Actor::start(TEST, "importer", &[]);
    other.tell(&to_text(&handle));
    assert_eq!(other.hear(), "[1.0, 2.0, 3.0]");
    assert_eq!(other.hear(), "incremented");
    assert_eq!(download(at, 3), Ok(vec![2.0, 3.0, 4.0]));
    // SAFETY: the address was allocated.
    ok(unsafe { cuMemFree_v2(at) });
    other.tell("freed");
    assert_eq!(other.hear(), "true", "freed memory is not a number for those who still have it");
    other.end();
}

#[test]
fn processes_share_the_memory_of_a_device() {
    const TEST: &str = "processes::processes_share_the_memory_of_a_device";
    let hold = || {
        open(0);
        // SAFETY: the pointer is valid.
        let at = get(|out| unsafe { cuMemAlloc_v2(out, 50 << 20) });
        say(&memory_mib().0.to_string());
        listen();
        // SAFETY: the address was allocated.
        ok(unsafe { cuMemFree_v2(at) });
        say(&memory_mib().0.to_string());
        listen();
    };
    if part().is_some() {
        return hold();
    }
    let ledger = std::env::temp_dir().join(format!("cuemu-ledger-{}", std::process::id()));
    let settings = [
        ("CUEMU_MEMORY_MIB", "200"),
        ("CUEMU_CONTEXT_MIB", "10"),
        ("CUEMU_LEDGER", ledger.to_str().expect("a path of text")),
    ];
    let mut one = Actor::start(TEST, "one", &settings);
    assert_eq!(one.hear(), "140");
    let mut two = Actor::start(TEST, "two", &settings);
    assert_eq!(two.hear(), "80");
    one.tell("free it");
    assert_eq!(one.hear(), "130");
    // Who dies gives all back.
    two.kill();
    let mut three = Actor::start(TEST, "three", &settings);
    assert_eq!(three.hear(), "130");
    three.tell("free it");
    assert_eq!(three.hear(), "180");
    three.end();
    one.end();
    std::fs::remove_file(ledger).expect("the ledger was there");
}
