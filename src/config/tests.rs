use super::*;

#[test]
fn bytes_take_units() {
    for (text, bytes) in [("2GiB", 2 << 30), ("1.5g", 3 << 29), ("500MB", 500_000_000), ("17", 17)] {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
    assert!(parse_bytes("3 parsecs").unwrap_err().contains("parsecs"));
    assert!(parse_bytes("GiB").is_err());
    assert!(parse_bytes("18446744073709551615").is_err() && parse_bytes("99999999999999GiB").is_err());
}

#[test]
fn host_names_have_no_scheme_and_no_port() {
    let names = |value: &str| {
        let line = ["rollout-server", "--model", "m", "--allow-host", value];
        Config::try_parse_from(line).map(|config| config.allow_host)
    };
    assert_eq!(names("rollout.example,gpu-box").expect("two names"), ["rollout.example", "gpu-box"]);
    for wrong in ["", "http://rollout.example", "rollout.example:8000", "*", "a b", "a,,b"] {
        let error = names(wrong).expect_err("no name").to_string();
        assert!(error.contains("--allow-host") && error.contains("is not a host name"), "{error}");
    }
}

#[test]
fn flags_that_give_up_batch_invariance_are_known() {
    let is_invariant = |flags: &[&str]| {
        let line = ["rollout-server", "--model", "m"].iter().chain(flags);
        Config::try_parse_from(line).unwrap().is_batch_invariant()
    };
    assert!(is_invariant(&[]) && is_invariant(&["--tp", "2"]) && is_invariant(&["--all-reduce", "nccl"]));
    assert!(!is_invariant(&["--tp", "2", "--all-reduce", "nccl"]) && !is_invariant(&["--attention", "flash"]));
}

#[test]
fn a_bad_value_is_named_with_what_is_allowed() {
    for (args, part) in [
        (&["--mem-util", "0"][..], "--mem-util 0: must be above 0"),
        (&["--lora-modules", "a=/x", "b=/y"], "--max-adapters 0: must be at least 2, the number of --lora-modules"),
        (&["--mem-util", "NaN"], "--mem-util NaN"),
        (&["--port", "8000"], "--port 8000: must be different from --http-port: --port is gRPC's"),
        (&["--tp", "0"], "--tp 0: must be from 1 to 64"),
        (&["--block-size", "0"], "--block-size 0"),
        (&["--max-model-len", "1"], "--max-model-len 1"),
        (&["--weights-dir", "/does/not/exist"], "--weights-dir /does/not/exist: must be an existing directory"),
        (&["--update-idle-seconds", "0"], "--update-idle-seconds 0: must be from 1 to"),
        (&["--update-idle-seconds", "18446744073709551615"], "--update-idle-seconds 18446744073709551615"),
        (&["--tls-cert", "a.pem"], "--tls-cert a.pem: must be given together with --tls-key"),
        (&["--tls-key", "a.pem"], "--tls-key a.pem: must be given together with --tls-cert"),
        (&["--tls-client-ca", "a.pem"], "--tls-client-ca a.pem: must be given together with --tls-cert and"),
        (&["--weights-dir", "/dev/null"], "--weights-dir /dev/null: must be an existing directory"),
        (&["--adapters-dir", "/does/not/exist"], "--adapters-dir /does/not/exist: must be an existing directory"),
        (&["--adapters-dir", "/tmp"], "--max-adapters 0: must be at least 1: the 0 of --lora-modules leave"),
        (
            &["--adapters-dir", "/tmp", "--max-adapters", "2", "--lora-modules", "a=/x", "b=/y"],
            "--max-adapters 2: must be at least 3: the 2 of --lora-modules leave --adapters-dir no slot",
        ),
        (&["--max-queued-samples", "18446744073709551615"], "--max-queued-samples 18446744073709551615: must be"),
        (&["--tenant-max-running", "0"], "--tenant-max-running 0: must be at least 1"),
        (&["--tenant-kv-share", "0"], "--tenant-kv-share 0: must be above 0 and at most 1"),
        (&["--tenant-kv-share", "NaN"], "--tenant-kv-share NaN: must be above 0"),
        (&["--max-connections", "0"], "--max-connections 0: must be from 1 to 65536"),
        (&["--watchdog-seconds", "86401"], "--watchdog-seconds 86401: must be at most 86400"),
        (&["--liveness-seconds", "0"], "--liveness-seconds 0: must be from 1 to 86400"),
        (&["--shutdown-grace-seconds", "86401"], "--shutdown-grace-seconds 86401: must be at most 86400"),
    ] {
        let line = ["rollout-server", "--model", "m"].iter().chain(args);
        let error = Config::try_parse_from(line).unwrap().check().unwrap_err().to_string();
        assert!(error.contains(part), "{part:?} is missing in {error:?}");
    }
}
