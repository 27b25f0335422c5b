//! The command line.

use std::io::{IsTerminal, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Dsn, OnOff};
use crate::coordinator::{Coordinator, CoordinatorOptions};
use crate::engine::Limits;
use crate::store::{OpenError, postgres, sqlite};
use crate::telemetry::{self, LogFormat, Metrics};
use crate::{http, shutdown};

/// Coordinates processes over Postgres or an embedded file: fenced leases over HTTP.
///
/// Without a command it serves: from sqlite:fencepost.db, on 127.0.0.1:7420.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    config: Config,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve HTTP until told to stop
    Serve(Box<Config>),
    /// Create or update the tables, and end
    Migrate(Box<Config>),
    /// Print the OpenAPI document
    Openapi {
        /// 3.1, or the 3.0.3 profile for SDK generators
        #[arg(long, default_value = "3.1", value_parser = ["3.1", "3.0"])]
        profile: String,
    },
    /// Ask a running service whether it is ready; for container health checks
    Health {
        /// Its address
        #[arg(long, env = "FENCEPOST_LISTEN", default_value = "127.0.0.1:7420")]
        listen: SocketAddr,
    },
}

/// Bad configuration.
const EXIT_CONFIGURATION: u8 = 2;
/// The store, or the address, cannot be had.
const EXIT_FAILURE: u8 = 1;

/// Why the process cannot do what it was started for.
struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    fn configuration(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: EXIT_CONFIGURATION }
    }

    fn other(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: EXIT_FAILURE }
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Configuration(message) => Self::configuration(message),
            OpenError::Unreachable(message) => Self::other(message),
        }
    }
}

/// Runs the command line; its errors are one line each.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        None => run(serve(cli.config)),
        Some(Command::Serve(config)) => run(serve(*config)),
        Some(Command::Migrate(config)) => run(migrate(*config)),
        Some(Command::Openapi { profile }) => print_document(&profile),
        Some(Command::Health { listen }) => run(check_health(listen)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { message, code }) => {
            let _ = writeln!(std::io::stderr(), "fencepost: {}", message.replace('\n', " "));
            ExitCode::from(code)
        }
    }
}

fn run(task: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::other(format!("cannot start threads: {error}")))?;
    let result = runtime.block_on(task);
    // Whatever still runs has had its time.
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

fn start(config: &Config) -> Result<Dsn, Failure> {
    let is_terminal = std::io::stderr().is_terminal();
    let by_terminal = if is_terminal { LogFormat::Text } else { LogFormat::Json };
    let format = config.log_format.unwrap_or(by_terminal);
    telemetry::start_logging(&config.log, format, is_terminal)
        .map_err(|error| Failure::configuration(format!("--log {:?}: {error}", config.log)))?;
    config.check().map_err(Failure::configuration)
}

async fn serve(config: Config) -> Result<(), Failure> {
    let dsn = start(&config)?;
    let stop = CancellationToken::new();
    let metrics = Arc::new(Metrics::default());
    // First the address: if that is taken, the store is better left alone.
    let listener = TcpListener::bind(config.listen)
        .await
        .map_err(|error| Failure::other(format!("cannot listen on {}: {error}", config.listen)))?;
    let options = CoordinatorOptions {
        owner_id: None,
        migrate: config.migrate == OnOff::On,
        connect_timeout: config.connect_timeout,
        notify_url: config.notify_url.clone(),
        idle_key_retention: config.idle_key_retention,
        cleanup_interval: config.cleanup_interval,
        idempotency_retention: config.idempotency_ttl,
        execution_retention: config.execution_retention,
        limits: Limits::default(),
        metrics: Arc::clone(&metrics),
    };
    let stop_requested = shutdown::requested()
        .map_err(|error| Failure::other(format!("cannot listen for signals: {error}")))?;
    tokio::pin!(stop_requested);
    let coordinator = tokio::select! {
        coordinator = Coordinator::open_dsn(&dsn, options) => coordinator?,
        () = &mut stop_requested => return Ok(()),
    };
    let address = listener.local_addr().unwrap_or(config.listen);
    greet(&dsn, address);
    let (router, app) = http::router(coordinator, metrics);
    let serving = tokio::spawn(http::serve(listener, router, app, stop.clone()));
    stop_requested.await;
    stop.cancel();
    serving.await.map_err(|error| Failure::other(format!("the server failed: {error}")))
}

/// Tells where it listens, on what, and what to try, on standard output.
fn greet(dsn: &Dsn, address: SocketAddr) {
    let store = match dsn {
        Dsn::Memory => "memory: everything is forgotten at the end".to_owned(),
        Dsn::Sqlite(path) => format!("SQLite file {}", path.display()),
        Dsn::Postgres(urls) if urls.len() > 1 => format!("Postgres, {} servers", urls.len()),
        Dsn::Postgres(_) => "Postgres".to_owned(),
    };
    let text = format!(
        "fencepost {} listens on http://{address}\n\
         store: {store}\n\
         docs:  http://{address}/docs\n\
         try:   curl -s http://{address}/v1/leases/claim -H 'content-type: application/json' \
         -d '{{\"key\":\"demo\",\"owner_id\":\"me\",\"ttl_ms\":30000}}'\n",
        env!("CARGO_PKG_VERSION"),
    );
    // Nobody may be reading.
    let _ = std::io::stdout().write_all(text.as_bytes());
    tracing::info!(%address, store, "listening");
}

async fn migrate(config: Config) -> Result<(), Failure> {
    let dsn = start(&config)?;
    let deadline = tokio::time::Instant::now() + config.connect_timeout;
    loop {
        let result = match &dsn {
            Dsn::Memory => Ok(()),
            Dsn::Sqlite(path) => sqlite::migrate(path).await,
            Dsn::Postgres(urls) => postgres::migrate(urls).await,
        };
        match result {
            Ok(()) => break,
            Err(OpenError::Unreachable(reason)) if tokio::time::Instant::now() < deadline => {
                tracing::warn!(%reason, "cannot reach the store; trying again");
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let _ = writeln!(std::io::stdout(), "the tables are up to date");
    Ok(())
}

fn print_document(profile: &str) -> Result<(), Failure> {
    let documents = http::documents();
    let text = if profile == "3.0" { documents.v3_0 } else { documents.v3_1 };
    std::io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Failure::other(format!("cannot write the document: {error}")))
}

async fn check_health(listen: SocketAddr) -> Result<(), Failure> {
    let mut address = listen;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    let asking = async {
        let mut stream = TcpStream::connect(address).await?;
        let request =
            format!("GET /readyz HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await?;
        std::io::Result::Ok(reply)
    };
    let reply = tokio::time::timeout(Duration::from_secs(5), asking)
        .await
        .map_err(|_| Failure::other(format!("{address} does not answer")))?
        .map_err(|error| Failure::other(format!("{address}: {error}")))?;
    if reply.starts_with("HTTP/1.1 200 ") {
        return Ok(());
    }
    let body = reply.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Err(Failure::other(format!("{address} is not ready: {body}")))
}
