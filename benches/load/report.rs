//! What a run came to: tables, ratios and plots, printed and written into the documentation.

use std::fmt::Write as _;
use std::path::Path;

use crate::client::Figures;

/// The contestants of one table, which take turns, round by round.
pub(crate) struct Table {
    title: String,
    lines: Vec<Line>,
}

struct Line {
    name: String,
    /// One for each round.
    rounds: Vec<Figures>,
}

impl Line {
    fn median(&self, of: impl Fn(&Figures) -> f64) -> f64 {
        let mut values: Vec<f64> = self.rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    fn errors(&self) -> u64 {
        self.rounds.iter().map(|figures| figures.errors).sum()
    }
}

impl Table {
    pub(crate) fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), lines: Vec::new() }
    }

    pub(crate) fn add(&mut self, name: impl Into<String>, figures: Figures) {
        let name = name.into();
        match self.lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.rounds.push(figures),
            None => self.lines.push(Line { name, rounds: vec![figures] }),
        }
    }

    /// The median, over the rounds, of one rate in units of another of the same round.
    pub(crate) fn ratio(&self, name: &str, to: &str) -> Option<f64> {
        let rates = |name: &str| -> Option<Vec<f64>> {
            let line = self.lines.iter().find(|line| line.name == name)?;
            Some(line.rounds.iter().map(Figures::rate).collect())
        };
        let mut ratios: Vec<f64> =
            rates(name)?.into_iter().zip(rates(to)?).map(|(a, b)| a / b).collect();
        ratios.sort_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied()
    }

    fn markdown(&self) -> String {
        let mut text = format!(
            "### {}\n\n| | operations/s | p50 ms | p99 ms | p99.9 ms | server µs CPU | \
             client µs CPU | machine µs CPU | errors |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
            self.title
        );
        for line in &self.lines {
            let _ = writeln!(
                text,
                "| {} | {:.0} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} | {:.0} | {} |",
                line.name,
                line.median(Figures::rate),
                line.median(|figures| figures.percentile_ms(50.0)),
                line.median(|figures| figures.percentile_ms(99.0)),
                line.median(|figures| figures.percentile_ms(99.9)),
                line.median(|figures| figures.server_cpu_us),
                line.median(|figures| figures.client_cpu_us),
                line.median(|figures| figures.all_cpu_us),
                line.errors(),
            );
        }
        text
    }

    fn bars(&self) -> Vec<(String, f64)> {
        let bar = |line: &Line| (line.name.clone(), line.median(Figures::rate));
        self.lines.iter().map(bar).collect()
    }
}

/// Collects what is printed, for the documentation.
#[derive(Default)]
pub(crate) struct Report {
    text: String,
    plots: Vec<(String, String)>,
}

impl Report {
    pub(crate) fn say(&mut self, line: impl AsRef<str>) {
        println!("{}", line.as_ref());
        self.text += line.as_ref();
        self.text.push('\n');
    }

    /// Adds a table, and under `plot` a picture of its rates.
    pub(crate) fn table(&mut self, table: &Table, plot: Option<&str>) {
        self.say(table.markdown());
        if let Some(name) = plot {
            let file = format!("performance-{name}.svg");
            self.say(format!("![Operations per second: {}]({file})\n", table.title));
            self.plots.push((file, plot_bars(&table.title, &table.bars())));
        }
    }

    /// Writes everything between the markers of docs/performance.md, and the plots beside it.
    pub(crate) fn write(&self) {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
        let path = docs.join("performance.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once(BEGIN).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        let text = self.text.trim();
        std::fs::write(&path, format!("{before}{BEGIN}\n\n{text}\n\n{END}{after}")).unwrap();
        for (file, svg) in &self.plots {
            std::fs::write(docs.join(file), svg).unwrap();
        }
    }
}

const BEGIN: &str = "<!-- figures: written by `make bench` -->";
const END: &str = "<!-- end of figures -->";

/// Horizontal bars, as SVG.
fn plot_bars(title: &str, bars: &[(String, f64)]) -> String {
    const ROW: usize = 26;
    const LEFT: usize = 230;
    const WIDTH: usize = 420;
    let most = bars.iter().map(|(_, value)| *value).fold(1.0, f64::max);
    let height = 50 + bars.len() * ROW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"760\" height=\"{height}\" \
         viewBox=\"0 0 760 {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"12\" y=\"24\" font-weight=\"bold\">Operations per second: {title}</text>\n"
    );
    for (index, (name, value)) in bars.iter().enumerate() {
        let (top, length) = (40 + index * ROW, value / most * WIDTH as f64);
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\
             <rect x=\"{LEFT}\" y=\"{top}\" width=\"{length:.0}\" height=\"18\" fill=\"#4878a8\"/>\
             <text x=\"{:.0}\" y=\"{}\">{value:.0}</text>",
            LEFT - 10,
            top + 14,
            LEFT as f64 + length + 8.0,
            top + 14,
        );
    }
    svg + "</svg>\n"
}
