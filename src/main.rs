//! The server process: reads the configuration, starts the engine, serves until it is told to end.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Parser;
use rollout_server::config::{Config, LogFormat};
use rollout_server::error::{Error, Result};
use rollout_server::profile::{Profile, profile};
use rollout_server::server::{Bound, Ended, ServerConfig, serve, shutdown_channel, watch_signals};
use rollout_server::startup;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

fn main() {
    let config = Config::parse();
    let result = init_logs(&config).and_then(|profile| {
        let result = run(config, profile.clone());
        profile.iter().for_each(print_profile);
        result
    });
    if let Err(error) = result {
        eprintln!("rollout-server: {error}");
        std::process::exit(1);
    }
}

fn run(config: Config, profile: Option<Profile>) -> Result<()> {
    config.check()?;
    let runtime = tokio::runtime::Runtime::new().map_err(|e| Error::Internal(format!("no runtime: {e}")))?;
    let bound = Bound::new(&ServerConfig {
        host: config.host.clone(),
        port: config.port,
        shutdown_grace: Duration::from_secs(config.shutdown_grace_seconds),
    })?;
    let (handle, orders) = shutdown_channel();
    let (thread_sender, engine_thread) = std::sync::mpsc::channel();
    let ended = runtime.block_on(async move {
        watch_signals(handle.clone())?;
        if let Some(profile) = profile {
            print_on_signal(profile)?;
        }
        let parts = async move {
            let load = move || startup::start(&config).map(|started| (config, started));
            let loaded = tokio::task::spawn_blocking(load).await;
            let (config, started) = loaded.map_err(|e| Error::Internal(format!("the start failed: {e}")))??;
            let (parts, thread) = started.into_parts(&config);
            // An engine that dies takes the server with it: a supervisor restarts a process, not half of one.
            let watcher = std::thread::spawn(move || {
                let result = thread.join().unwrap_or_else(|_| Err(Error::Internal("the engine panicked".into())));
                handle.order();
                result
            });
            let _ = thread_sender.send(watcher);
            Ok(parts)
        };
        serve(bound, parts, orders).await
    });
    // A load that was cut short is not waited for.
    runtime.shutdown_background();
    let ended = ended?;
    match engine_thread.try_recv() {
        Ok(thread) if ended == Ended::Drained => thread.join().expect("the watcher does not panic"),
        _ => Ok(()),
    }
}

/// Logs, and the profile if it is asked for.
fn init_logs(config: &Config) -> Result<Option<Profile>> {
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|e| Error::Config(format!("--log {:?} is not a log filter: {e}; try info or debug", config.log)))?;
    let logs = tracing_subscriber::fmt::layer()
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let logs = match config.log_format {
        LogFormat::Text => logs.with_filter(filter).boxed(),
        LogFormat::Json => logs.json().with_filter(filter).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(logs);
    if !config.profile {
        subscriber.init();
        return Ok(None);
    }
    let (spans, profile) = profile()?;
    subscriber.with(spans).init();
    Ok(Some(profile))
}

fn print_profile(profile: &Profile) {
    eprint!("{}", profile.report());
}

/// Prints the profile at each SIGUSR1 for as long as the runtime lives. Must be called inside a tokio runtime.
fn print_on_signal(profile: Profile) -> Result<()> {
    let mut asked = signal(SignalKind::user_defined1())
        .map_err(|e| Error::Internal(format!("cannot handle SIGUSR1 for --profile: {e}")))?;
    tokio::spawn(async move {
        while asked.recv().await.is_some() {
            print_profile(&profile);
        }
    });
    Ok(())
}
