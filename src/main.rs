//! The server process: reads the configuration, starts the engine, serves until it is told to end.

use std::io::IsTerminal;
use std::time::Duration;

use clap::Parser;
use rollout_server::config::{Config, LogFormat};
use rollout_server::error::{Error, Result};
use rollout_server::server::{Bound, Ended, ServerConfig, serve, shutdown_channel, watch_signals};
use rollout_server::startup;
use tracing_subscriber::EnvFilter;

fn main() {
    let config = Config::parse();
    let result = init_logs(&config).and_then(|()| run(config));
    if let Err(error) = result {
        eprintln!("rollout-server: {error}");
        std::process::exit(1);
    }
}

fn run(config: Config) -> Result<()> {
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

fn init_logs(config: &Config) -> Result<()> {
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|e| Error::Config(format!("--log {:?} is not a log filter: {e}; try info or debug", config.log)))?;
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match config.log_format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().init(),
    }
    Ok(())
}
