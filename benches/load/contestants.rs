//! The servers, each a process: this binary with `serve STORE`, and etcd.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fencepost::coordinator::{Coordinator, CoordinatorOptions};
use fencepost::http::{self, Rival};
use fencepost::store::PgPool;
use fencepost::telemetry::{LogFormat, start_logging};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const NAIVE_TABLE: &str = "
    CREATE TABLE IF NOT EXISTS naive_leases (
        key text PRIMARY KEY, owner_id text NOT NULL, version bigint NOT NULL,
        acquired_at timestamptz NOT NULL, expires_at timestamptz NOT NULL
    )";

const NAIVE_CLAIM: &str = "
    INSERT INTO naive_leases AS l (key, owner_id, version, acquired_at, expires_at)
    VALUES ($1, $2, 1, clock_timestamp(), clock_timestamp() + $3 * interval '1 ms')
    ON CONFLICT (key) DO UPDATE
    SET owner_id = $2, version = l.version + 1, acquired_at = clock_timestamp(),
        expires_at = clock_timestamp() + $3 * interval '1 ms'
    WHERE l.expires_at <= clock_timestamp()
    RETURNING version";

fn naive(pool: PgPool) -> Rival {
    Arc::new(move |key, owner_id, ttl| {
        let pool = pool.clone();
        Box::pin(async move {
            let claim = sqlx::query_scalar(NAIVE_CLAIM)
                .bind(key.as_str())
                .bind(owner_id.as_str())
                .bind(ttl.as_millis() as f64);
            claim.fetch_optional(&pool).await.unwrap()
        })
    })
}

const REDIS_CLAIM: &str = "
    if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
        return redis.call('INCR', 'fence')
    end
    return nil";

async fn redis(url: &str) -> Rival {
    let client = redis::Client::open(url).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let script = Arc::new(redis::Script::new(REDIS_CLAIM));
    Arc::new(move |key, owner_id, ttl| {
        let (mut connection, script) = (connection.clone(), Arc::clone(&script));
        Box::pin(async move {
            let mut claim = script.key(key.as_str());
            claim.arg(owner_id.as_str()).arg(ttl.as_millis());
            claim.invoke_async(&mut connection).await.unwrap()
        })
    })
}

/// What HTTP alone costs.
fn floor() -> Rival {
    Arc::new(|_, _, _| Box::pin(async { Some(1_796_025_600_000_000) }))
}

/// Serves until killed; prints the address.
pub(crate) async fn serve(database_url: &str, redis_url: Option<&str>) {
    // What a running service spends on its logs belongs to its cost.
    start_logging("info", LogFormat::Text, false).unwrap();
    let options = CoordinatorOptions::default();
    let metrics = Arc::clone(&options.metrics);
    let coordinator = Coordinator::open(database_url, options).await.unwrap();
    let mut rivals = vec![("/bench/floor", floor())];
    if let Some(pool) = coordinator.pool() {
        sqlx::raw_sql(NAIVE_TABLE).execute(&pool).await.unwrap();
        rivals.push(("/bench/naive", naive(pool)));
    }
    if let Some(url) = redis_url {
        rivals.push(("/bench/redis", redis(url).await));
    }
    let (router, app) = http::router_with_rivals(coordinator, metrics, rivals);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    http::serve(listener, router, app, CancellationToken::new()).await;
}

/// A process that ends with this one.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
}

impl Server {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The memory that it has, in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).unwrap();
        statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    /// One of the figures that it shows.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let url = format!("http://{}/metrics", self.address);
        let text = reqwest::get(url).await.unwrap().text().await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts this binary as a server.
pub(crate) fn start(database_url: &str, redis_url: Option<&str>) -> Server {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["serve", database_url]).args(redis_url);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut address = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
    Server { child, address: address.trim().to_owned() }
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Starts Redis with a log that is durable at every command; `None` if it is not installed.
pub(crate) fn start_redis(directory: &std::path::Path) -> Option<Server> {
    let port = free_port().to_string();
    let child = Command::new("redis-server")
        .args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"])
        .args(["--appendfsync", "always", "--dir"])
        .arg(directory)
        .stdout(Stdio::null())
        .spawn()
        .ok()?;
    let server = Server { child, address: format!("127.0.0.1:{port}") };
    wait_for(&server.address);
    Some(server)
}

/// Starts etcd; `None` if it is not installed.
pub(crate) fn start_etcd(directory: &std::path::Path) -> Option<Server> {
    let (client, peer) = (free_port(), free_port());
    let (client_url, peer_url) =
        (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let child = Command::new("etcd")
        .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
        .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
        .args(["--initial-cluster", &format!("default={peer_url}"), "--data-dir"])
        .arg(directory.join("etcd"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let server = Server { child, address: format!("127.0.0.1:{client}") };
    wait_for(&server.address);
    Some(server)
}

fn wait_for(address: &str) {
    for _ in 0..200 {
        if std::net::TcpStream::connect(address).is_ok() {
            // The port is open before the first election is over.
            std::thread::sleep(Duration::from_secs(2));
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("nothing listens on {address}");
}
