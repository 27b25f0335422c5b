//! How figures change with the number of keys, of connections and of replicas, and with time.

use std::time::Duration;

use sqlx::Connection as _;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use std::str::FromStr as _;

use crate::Settings;
use crate::client::load;
use crate::contestants::{Server, start};
use crate::report::{Report, Table};
use crate::workloads::{Claims, Executions, Fresh, RenewalsAmong, Replays};

/// Makes an empty database beside the given one, and gives its URL.
async fn database(url: &str, name: &str) -> String {
    let mut connection = PgConnection::connect(url).await.unwrap();
    for statement in [format!("DROP DATABASE IF EXISTS {name}"), format!("CREATE DATABASE {name}")]
    {
        execute(&mut connection, statement).await;
    }
    let options = PgConnectOptions::from_str(url).unwrap().database(name);
    let (host, port, user) = (options.get_host(), options.get_port(), options.get_username());
    format!("postgres://{user}@{host}:{port}/{name}")
}

/// Runs a text made of numbers and names in this file.
async fn execute(connection: &mut PgConnection, statement: String) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(connection).await.unwrap();
}

/// Puts leases that are held for a day into a database whose tables are there already.
async fn hold(url: &str, count: u64) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let insert = format!(
        "INSERT INTO fencepost.leases (id, revision, version, grant_id, ttl_ms, acquired_at,
                                       expires_at, status, owner_id)
         SELECT '1' || chr(31) || 'default' || chr(31) || chr(31) || 'held-' || n, 1, 1, n, 86400000,
                now, now + 86400000000, 0, 'bench'
         FROM generate_series(1, {count}) AS n,
              (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS now) AS clock;
         INSERT INTO fencepost.records (id, revision, version, grant_id, ttl_ms, acquired_at,
                                        expires_at, status, owner_id, binding, completed_at, content)
         SELECT '3' || chr(31) || 'default' || chr(31) || chr(31) || 'done-' || n, 1, 1, n, 30000,
                now, now, 5, 'bench', 'i', now, '{{\"ok\":true}}'
         FROM generate_series(1, {count}) AS n,
              (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS now) AS clock"
    );
    execute(&mut connection, insert).await;
    execute(&mut connection, "VACUUM ANALYZE".to_owned()).await;
    execute(&mut connection, "CHECKPOINT".to_owned()).await;
}

/// The same work on stores of different sizes, with clean-up walking through them each minute.
pub(crate) async fn keys(settings: &Settings, url: &str, report: &mut Report) {
    const SIZES: [(u64, &str); 3] = [(1_000, "1 k"), (100_000, "100 k"), (1_000_000, "1 M")];
    let mut servers: Vec<(u64, &str, Server)> = Vec::new();
    for (count, name) in SIZES {
        let url = database(url, &format!("growth_{count}")).await;
        let server = start(&url, None);
        hold(&url, count).await;
        servers.push((count, name, server));
    }
    let fresh = Fresh::new();
    let (connections, duration) = (settings.connections, settings.duration);
    let title = "Postgres, leases and completed executions in the tables";
    let mut table = Table::new(title);
    for _ in 0..settings.rounds {
        for (count, name, server) in &servers {
            let claims = |_| Claims("/v1/leases/claim", fresh.clone());
            let figures = load(&[server], connections, duration, claims).await;
            table.add(format!("claim, {name}"), figures);
            let figures = load(&[server], connections, duration, |_| RenewalsAmong(*count)).await;
            table.add(format!("renew, {name}"), figures);
            let executions = |_| Executions(fresh.clone());
            let figures = load(&[server], connections, duration, executions).await;
            table.add(format!("execution, {name}"), figures);
            let figures = load(&[server], connections, duration, |_| Replays(*count)).await;
            table.add(format!("replay, {name}"), figures);
        }
    }
    report.table(&table, Some("keys"));
    for work in ["claim", "renew", "execution", "replay"] {
        for (_, name, _) in &servers[1..] {
            let ratio = table.ratio(&format!("{work}, {name}"), &format!("{work}, 1 k"));
            report.say(format!("* {work}: {name} / 1 k = {:.2}", ratio.unwrap()));
        }
    }
    report.say("");
}

/// How batches grow with the load.
pub(crate) async fn connections(settings: &Settings, url: &str, report: &mut Report) {
    let server = start(url, None);
    let fresh = Fresh::new();
    let mut table = Table::new("Postgres, claims by 1 to 1,024 connections");
    let mut sizes = Vec::new();
    for connections in [1, 4, 16, 64, 256, 1_024] {
        let batches = |name: &'static str| {
            let server = &server;
            async move { server.metric(&format!("fencepost_batch_keys_{name}")).await }
        };
        let before = (batches("sum").await, batches("count").await);
        for _ in 0..settings.rounds {
            let work = |_| Claims("/v1/leases/claim", fresh.clone());
            let figures = load(&[&server], connections, settings.duration, work).await;
            table.add(format!("{connections}"), figures);
        }
        let (keys, count) = (batches("sum").await - before.0, batches("count").await - before.1);
        sizes.push(format!("{:.1}", keys / count));
    }
    report.table(&table, Some("connections"));
    report.say(format!("Keys in a batch, on average: {}.\n", sizes.join(", ")));
}

/// The same connections, spread over one to four processes on one database.
pub(crate) async fn replicas(settings: &Settings, url: &str, report: &mut Report) {
    let servers: Vec<Server> = (0..4).map(|_| start(url, None)).collect();
    let fresh = Fresh::new();
    let mut table = Table::new("Postgres, claims on one to four replicas");
    for _ in 0..settings.rounds {
        for count in 1..=servers.len() {
            let chosen: Vec<&Server> = servers.iter().take(count).collect();
            let work = |_| Claims("/v1/leases/claim", fresh.clone());
            let figures = load(&chosen, settings.connections, settings.duration, work).await;
            table.add(format!("{count}"), figures);
        }
    }
    report.table(&table, Some("replicas"));
}

/// What a long time of nothing but renewals does to the table.
pub(crate) async fn renewals(settings: &Settings, url: &str, report: &mut Report) {
    const COUNT: u64 = 100_000;
    let url = database(url, "renewals").await;
    let server = start(&url, None);
    hold(&url, COUNT).await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let before = table_figures(&mut connection).await;
    let duration = Duration::from_secs(60 * settings.minutes);
    let work = |_| RenewalsAmong(COUNT);
    let figures = load(&[&server], settings.connections, duration, work).await;
    // Statistics are reported with a delay.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let after = table_figures(&mut connection).await;
    let mut table =
        Table::new(format!("Postgres, {} minutes of renewals of 100,000 leases", settings.minutes));
    table.add("renew", figures);
    report.table(&table, None);
    let (updates, hot) = (after.updates - before.updates, after.hot - before.hot);
    let share = 100.0 * hot as f64 / updates as f64;
    report.say(format!("* updates: {updates}, heap-only (HOT): {share:.1} %"));
    let kib = |bytes: i64| bytes / 1024;
    report.say(format!("* heap: {} KiB, then {} KiB", kib(before.heap), kib(after.heap)));
    report.say(format!("* index: {} KiB, then {} KiB\n", kib(before.index), kib(after.index)));
}

struct TableFigures {
    updates: i64,
    hot: i64,
    heap: i64,
    index: i64,
}

async fn table_figures(connection: &mut PgConnection) -> TableFigures {
    let (updates, hot, heap, index) = sqlx::query_as(
        "SELECT n_tup_upd, n_tup_hot_upd, pg_relation_size(relid), pg_indexes_size(relid)
         FROM pg_stat_user_tables WHERE schemaname = 'fencepost' AND relname = 'leases'",
    )
    .fetch_one(connection)
    .await
    .unwrap();
    TableFigures { updates, hot, heap, index }
}
