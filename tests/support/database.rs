//! Fresh databases on the Postgres server that `DATABASE_URL` names.

use std::sync::atomic::{AtomicU32, Ordering};

use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor};

/// A database of one test; dropped with it.
pub struct Database {
    name: String,
    pub url: String,
}

fn server_url() -> String {
    std::env::var("DATABASE_URL").unwrap_or_else(|_| {
        panic!("no Postgres to test on: run `make test`, or set DATABASE_URL to a superuser's URL")
    })
}

fn url_of(name: &str) -> String {
    let server = server_url();
    let (base, query) = server.split_once('?').map_or((&*server, None), |(b, q)| (b, Some(q)));
    let base = base.rsplit_once('/').map_or(base, |(base, _)| base);
    query.map_or(format!("{base}/{name}"), |query| format!("{base}/{name}?{query}"))
}

async fn on_server(statement: String) {
    let mut connection = PgConnection::connect(&server_url()).await.unwrap();
    connection.execute(AssertSqlSafe(statement)).await.unwrap();
    connection.close().await.unwrap();
}

impl Database {
    pub async fn create() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fencepost_test_{}_{number}", std::process::id());
        on_server(format!("CREATE DATABASE {name}")).await;
        let url = url_of(&name);
        Self { name, url }
    }

    /// A session of one's own, as an operator has in psql.
    pub async fn connect(&self) -> PgConnection {
        let options: PgConnectOptions = self.url.parse().unwrap();
        PgConnection::connect_with(&options.application_name("test")).await.unwrap()
    }

    pub async fn execute(&self, statement: &'static str) {
        let mut connection = self.connect().await;
        connection.execute(statement).await.unwrap();
        connection.close().await.unwrap();
    }

    pub async fn fetch_all(&self, statement: &'static str) -> Vec<PgRow> {
        let mut connection = self.connect().await;
        let rows = connection.fetch_all(statement).await.unwrap();
        connection.close().await.unwrap();
        rows
    }

    /// One number.
    pub async fn number(&self, statement: &'static str) -> i64 {
        use sqlx::Row as _;
        self.fetch_all(statement).await[0].get(0)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let name = std::mem::take(&mut self.name);
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let statement = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
            runtime.unwrap().block_on(on_server(statement));
        });
        let _ = dropping.join();
    }
}
