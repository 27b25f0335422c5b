//! What can be set, from flags and `FENCEPOST_*` variables.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::domain::time::Retention;
use crate::telemetry::LogFormat;

/// Where the data is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dsn {
    /// This process' memory.
    Memory,
    /// A file, for one process.
    Sqlite(PathBuf),
    /// Postgres servers, of which one is the primary.
    Postgres(Vec<String>),
}

impl Dsn {
    /// Reads the value of `--database-url`, which may be several Postgres URLs.
    ///
    /// # Errors
    ///
    /// Says what is wrong and what would be right.
    pub fn parse(urls: &[String]) -> Result<Self, String> {
        let urls: Vec<&str> =
            urls.iter().map(|url| url.trim()).filter(|url| !url.is_empty()).collect();
        let is_postgres =
            |url: &&str| url.starts_with("postgres://") || url.starts_with("postgresql://");
        match urls.as_slice() {
            [] => Err("--database-url is empty".to_owned()),
            ["memory" | "memory:"] => Ok(Self::Memory),
            [url] if url.starts_with("sqlite:") => {
                let path = url.trim_start_matches("sqlite:").trim_start_matches("//");
                if path.is_empty() || path == ":memory:" {
                    return Err(format!(
                        "--database-url {url}: name a file, as in sqlite:fencepost.db, or use \
                         memory:"
                    ));
                }
                Ok(Self::Sqlite(PathBuf::from(path)))
            }
            urls if urls.iter().all(is_postgres) => {
                Ok(Self::Postgres(urls.iter().map(|&url| url.to_owned()).collect()))
            }
            // Not the value itself: it may hold a password.
            _ => Err("--database-url must be memory:, sqlite:FILE or postgres://…; only Postgres \
                      URLs can be several"
                .to_owned()),
        }
    }
}

/// Where to listen, and on what. The name of the flag is that of the field with `-` for `_`, that
/// of the variable the same in capitals behind `FENCEPOST_`.
#[derive(Clone, Debug, clap::Args)]
pub struct Config {
    /// Where the data is: `sqlite:FILE`, `postgres://…` or `memory:`. Several Postgres servers may
    /// be given (repeat the flag; in the variable, separate them by commas): the primary among
    /// them is used
    #[arg(
        long,
        env = "FENCEPOST_DATABASE_URL",
        default_value = "sqlite:fencepost.db",
        value_delimiter = ',',
        value_name = "URL",
        hide_env_values = true
    )]
    pub database_url: Vec<String>,

    /// A direct Postgres URL for LISTEN and NOTIFY, where --database-url goes through a
    /// transaction-mode pooler [default: the database URL]
    #[arg(long, env = "FENCEPOST_NOTIFY_URL", value_name = "URL", hide_env_values = true)]
    pub notify_url: Option<String>,

    /// The address to serve HTTP on
    #[arg(
        long,
        env = "FENCEPOST_LISTEN",
        default_value = "127.0.0.1:7420",
        value_name = "ADDRESS"
    )]
    pub listen: SocketAddr,

    /// Serve on an address other than loopback although there is no access control
    #[arg(long, env = "FENCEPOST_INSECURE_OPEN", num_args = 0..=1, default_value = "false", default_missing_value = "true", value_name = "BOOL")]
    pub insecure_open: bool,

    /// Create or update the tables at start
    #[arg(long, env = "FENCEPOST_MIGRATE", default_value = "on", value_name = "on|off")]
    pub migrate: OnOff,

    /// How long to wait at start for a store that cannot be reached
    #[arg(long, env = "FENCEPOST_CONNECT_TIMEOUT", default_value = "30s", value_parser = duration, value_name = "DURATION")]
    pub connect_timeout: Duration,

    /// How long a key stays known after its last use. While it is, late duplicates of a claim are
    /// refused, and a repeated release succeeds
    #[arg(long, env = "FENCEPOST_IDLE_KEY_RETENTION", default_value = "24h", value_parser = duration, value_name = "DURATION")]
    pub idle_key_retention: Duration,

    /// How often idle keys are looked for; at least 1ms
    #[arg(long, env = "FENCEPOST_CLEANUP_INTERVAL", default_value = "60s", value_parser = duration, value_name = "DURATION")]
    pub cleanup_interval: Duration,

    /// How long a stored response is kept if its caller does not say; 1s to 366 days
    #[arg(long, env = "FENCEPOST_IDEMPOTENCY_TTL", default_value = "24h", value_parser = retention, value_name = "DURATION")]
    pub idempotency_ttl: Retention,

    /// How long a completed execution is kept; 1s to 366 days [default: for ever]
    #[arg(long, env = "FENCEPOST_EXECUTION_RETENTION", value_parser = retention, value_name = "DURATION")]
    pub execution_retention: Option<Retention>,

    /// How log lines look [default: text on a terminal, else json]
    #[arg(long, env = "FENCEPOST_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,

    /// What to log: a level, or a filter such as `info,fencepost=debug`
    #[arg(long, env = "FENCEPOST_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,
}

/// A switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OnOff {
    /// Do.
    On,
    /// Do not.
    Off,
}

/// The longest duration that can be set: ten years.
const MAX_DURATION: Duration = Duration::from_hours(10 * 366 * 24);

fn duration(text: &str) -> Result<Duration, String> {
    let example = "write it like 500ms, 30s or 24h";
    let duration =
        humantime::parse_duration(text).map_err(|error| format!("{error}; {example}"))?;
    if duration > MAX_DURATION {
        return Err("longer than ten years".to_owned());
    }
    Ok(duration)
}

fn retention(text: &str) -> Result<Retention, String> {
    let millis = i64::try_from(duration(text)?.as_millis()).ok();
    millis.and_then(Retention::from_millis).ok_or_else(|| "must be from 1s to 366days".to_owned())
}

impl Config {
    /// Checks what single values cannot show.
    ///
    /// # Errors
    ///
    /// Says what is wrong and what to do.
    pub fn check(&self) -> Result<Dsn, String> {
        let dsn = Dsn::parse(&self.database_url)?;
        if !self.listen.ip().is_loopback() && !self.insecure_open {
            return Err(format!(
                "refusing to listen on {}: without access control anybody who can reach it could \
                 take or free every key. Listen on 127.0.0.1, or say --insecure-open if only \
                 trusted callers can reach it",
                self.listen
            ));
        }
        if self.cleanup_interval < Duration::from_millis(1) {
            return Err("--cleanup-interval must be at least 1ms".to_owned());
        }
        if self.notify_url.is_some() && !matches!(dsn, Dsn::Postgres(_)) {
            return Err("--notify-url goes with a Postgres --database-url only".to_owned());
        }
        Ok(dsn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(urls: &[&str]) -> Result<Dsn, String> {
        Dsn::parse(&urls.iter().map(|&url| url.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn each_store_has_its_url() {
        assert_eq!(parse(&["memory:"]), Ok(Dsn::Memory));
        assert_eq!(parse(&["memory"]), Ok(Dsn::Memory));
        assert_eq!(parse(&["sqlite:a/b.db"]), Ok(Dsn::Sqlite("a/b.db".into())));
        assert_eq!(parse(&["sqlite:///a/b.db"]), Ok(Dsn::Sqlite("/a/b.db".into())));
        let two = ["postgres://a/b", "postgresql://c/d"];
        assert_eq!(parse(&two), Ok(Dsn::Postgres(two.map(str::to_owned).to_vec())));
    }

    #[test]
    fn a_wrong_url_is_refused_without_being_repeated() {
        for wrong in [&["mysql://u:secret@h/d"][..], &["sqlite:"], &["memory:", "memory:"], &[""]] {
            let error = parse(wrong).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
