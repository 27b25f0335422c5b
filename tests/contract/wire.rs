//! HTTP by hand, for what no client library would send.

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A connection to a service.
pub(crate) struct Wire(pub(crate) TcpStream);

/// What came back on one, up to its end.
#[derive(Debug)]
pub(crate) struct Raw {
    /// 0 if the connection ended without a reply.
    pub(crate) status: u16,
    /// Status line and headers.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Raw {
    fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
        let (head, body) = end.map_or((bytes, &[][..]), |at| (&bytes[..at], &bytes[at + 4..]));
        let head = String::from_utf8_lossy(head).into_owned();
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        Self { status, head, body: body.to_vec() }
    }

    /// The text of a header, or nothing.
    pub(crate) fn header(&self, name: &str) -> &str {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        let mut found = lines.filter(|(given, _)| given.eq_ignore_ascii_case(name));
        found.next().map_or("", |(_, value)| value)
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

impl Wire {
    pub(crate) async fn connect(base: &str) -> Self {
        let address = base.strip_prefix("http://").unwrap();
        Self(TcpStream::connect(address).await.unwrap())
    }

    /// Sends bytes; a service that has closed already is no failure here.
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.0.write_all(bytes.as_ref()).await;
    }

    /// Reads to the end of the connection.
    pub(crate) async fn reply(mut self) -> Raw {
        let mut bytes = Vec::new();
        let reading = self.0.read_to_end(&mut bytes);
        timeout(Duration::from_secs(20), reading).await.expect("no end of the reply").ok();
        Raw::parse(&bytes)
    }

    /// Reads until this text has come.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        let mut read = String::new();
        while !read.contains(text) {
            let byte = timeout(Duration::from_secs(20), self.0.read_u8()).await;
            read.push(char::from(byte.expect("it did not come").expect("the end came first")));
        }
        read
    }
}

/// One request, as it stands, on a connection of its own.
pub(crate) async fn exchange(base: &str, request: impl AsRef<[u8]>) -> Raw {
    let mut wire = Wire::connect(base).await;
    wire.send(request).await;
    wire.reply().await
}

/// The head of a request that closes the connection; `more` has header lines.
pub(crate) fn head(method: &str, target: &str, more: &str) -> String {
    format!("{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{more}\r\n")
}

/// A POST of JSON with further header lines.
pub(crate) fn post(target: &str, more: &[u8], body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut bytes = format!(
        "POST {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n"
    )
    .into_bytes();
    bytes.extend_from_slice(more);
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(body);
    bytes
}

/// A POST of JSON in chunks of at most so many bytes, its length not told beforehand.
pub(crate) fn post_chunked(target: &str, body: &[u8], chunk: usize) -> Vec<u8> {
    let more = "content-type: application/json\r\ntransfer-encoding: chunked\r\n";
    let mut bytes = head("POST", target, more).into_bytes();
    for part in body.chunks(chunk) {
        bytes.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
        bytes.extend_from_slice(part);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"0\r\n\r\n");
    bytes
}
