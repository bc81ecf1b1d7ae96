//! The server process: reads the configuration, starts the engine, and serves until a signal or a failure ends it.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use rollout_server::config::{CommandLine, Config, LogFormat};
use rollout_server::error::{Error, Result};
use rollout_server::logs::{FlushOnDrop, LogWriter, log_panics};
use rollout_server::memory::{open_files_limit, resident_bytes, share_one_heap};
use rollout_server::observe::{Observer, TraceFile};
use rollout_server::profile::{Profile, profile};
use rollout_server::server::{
    Bound, Ended, SecurityConfig, ServerConfig, TlsFiles, connection_limit, serve, shutdown_channel, watch_signals,
};
use rollout_server::startup;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

fn main() -> ExitCode {
    share_one_heap();
    let (config, notes) = match CommandLine::parse(std::env::args().skip(1)) {
        Ok(CommandLine::Serve { config, notes }) => (*config, notes),
        Ok(CommandLine::Completion(shell)) => {
            print!("{}", String::from_utf8_lossy(&Config::completion(shell)));
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("rollout-server: {error}");
            return ExitCode::FAILURE;
        }
    };
    let logs = match LogWriter::new(std::io::stderr()) {
        Ok(logs) => logs,
        Err(error) => {
            eprintln!("rollout-server: {error}");
            return ExitCode::FAILURE;
        }
    };
    // From here on only the writer's thread writes to standard error, because the reader of a pipe may hang.
    let _flush = FlushOnDrop(logs.clone());
    let result = init_logs(&config, &logs).and_then(|profile| {
        notes.iter().for_each(|note| tracing::warn!("{note}"));
        let result = run(config, profile.clone(), &logs);
        profile.iter().for_each(|profile| print_profile(profile, &logs));
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logs.write(format!("rollout-server: {error}\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn run(config: Config, profile: Option<Profile>, logs: &LogWriter) -> Result<()> {
    config.check()?;
    let (mut observer, recorder) = Observer::new();
    observer.logs = Some(logs.clone());
    observer.metric_names.clone_from(&config.metrics_names);
    let trace =
        config.trace_file.as_deref().map(|path| TraceFile::create(path, observer.timeline.clone())).transpose()?;
    let runtime =
        tokio::runtime::Runtime::new().map_err(|e| Error::Internal(format!("cannot start the async runtime: {e}")))?;
    let bound = Bound::new(&ServerConfig {
        host: config.host.clone(),
        port: config.port,
        http_port: config.http_port,
        max_connections: max_connections(&config),
        shutdown_grace: Duration::from_secs(config.shutdown_grace_seconds),
        security: security(&config),
        lora_modules: config.adapters.lora_modules.clone(),
    })?;
    // Opens the file that measures resident memory now, while descriptors are left.
    let _ = resident_bytes();
    let (handle, orders) = shutdown_channel();
    let (thread_sender, engine_thread) = std::sync::mpsc::channel();
    let logs = logs.clone();
    let ended = runtime.block_on(async move {
        watch_signals(handle.clone())?;
        if let Some(profile) = profile {
            print_on_signal(profile, logs)?;
        }
        let watched = observer.clone();
        let context = async move {
            let load = move || startup::start(&config, watched, recorder);
            let loaded = tokio::task::spawn_blocking(load).await;
            let (context, thread) = loaded.map_err(|e| Error::Internal(format!("the start failed: {e}")))??;
            // The server ends when the engine's thread ends: a supervisor can restart a process, but not half of one.
            let watcher = std::thread::spawn(move || {
                let result = thread.join().unwrap_or_else(|_| Err(Error::Internal("the engine panicked".into())));
                handle.engine_ended();
                result
            });
            let _ = thread_sender.send(watcher);
            Ok(context)
        };
        serve(bound, observer, context, orders).await
    });
    // Does not wait for a model that is still loading.
    runtime.shutdown_background();
    if let Some(trace) = trace {
        trace.finish();
    }
    let ended = ended?;
    match engine_thread.try_recv() {
        Ok(thread) if ended == Ended::Drained => thread.join().expect("the watcher does not panic"),
        _ => Ok(()),
    }
}

/// The flags that protect the server.
fn security(config: &Config) -> SecurityConfig {
    let tls = config.tls_cert.clone().zip(config.tls_key.clone());
    let tls = tls.map(|(cert, key)| TlsFiles { cert, key, client_ca: config.tls_client_ca.clone() });
    SecurityConfig {
        tls,
        auth_token_file: config.auth_token_file.clone(),
        api_keys: config.api_key.clone(),
        insecure: config.insecure,
        allow_host: config.allow_host.clone(),
    }
}

/// `--max-connections` per port, lowered to the process's limit of open files.
fn max_connections(config: &Config) -> usize {
    let open_files = open_files_limit();
    let ports = 1 + usize::from(config.http_port.is_some());
    let allowed = connection_limit(config.max_connections, ports, open_files);
    if allowed < config.max_connections {
        tracing::warn!(
            "--max-connections {} is lowered to {allowed}: the process may open {open_files} files; raise `ulimit -n`",
            config.max_connections
        );
    }
    allowed
}

/// Installs the subscriber for logs. Returns the profile if `--profile` asks for one.
fn init_logs(config: &Config, logs: &LogWriter) -> Result<Option<Profile>> {
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|e| Error::Config(format!("--log {:?}: not a log filter ({e}); try info or debug", config.log)))?;
    let lines = tracing_subscriber::fmt::layer()
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(logs.clone());
    let lines = match config.log_format {
        LogFormat::Text => lines.with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(lines);
    log_panics(logs.clone());
    if !config.profile {
        subscriber.init();
        return Ok(None);
    }
    let (spans, profile) = profile()?;
    subscriber.with(spans).init();
    Ok(Some(profile))
}

fn print_profile(profile: &Profile, logs: &LogWriter) {
    logs.write(profile.report().as_bytes());
}

/// Prints the profile at each SIGUSR1, for as long as the runtime lives. Must be called inside a tokio runtime.
fn print_on_signal(profile: Profile, logs: LogWriter) -> Result<()> {
    let mut asked = signal(SignalKind::user_defined1())
        .map_err(|e| Error::Internal(format!("cannot handle SIGUSR1 for --profile: {e}")))?;
    tokio::spawn(async move {
        while asked.recv().await.is_some() {
            print_profile(&profile, &logs);
        }
    });
    Ok(())
}
