// What ranks know of themselves before they share memory, as texts, and the comparison of them.
#include "distributed/symmetric/rank_facts.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

namespace transformer_plugin::distributed {
namespace {

// Room for the address of a Unix socket, with the end of the string.
constexpr size_t kSocketPathLength = 108;

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string ranks_text(const std::vector<size_t>& ranks) {
  std::string text;
  for (const size_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::vector<std::string> each(const std::vector<RankFacts>& ranks,
                              const std::function<std::string(const RankFacts&)>& value) {
  std::vector<std::string> values;
  for (const RankFacts& facts : ranks) values.push_back(value(facts));
  return values;
}

bool differ(const std::vector<std::string>& values) {
  return std::any_of(values.begin(), values.end(),
                     [&](const std::string& value) { return value != values.front(); });
}

// Two ranks on one GPU, of which torch's rendezvous would fail, or a GPU that cannot access that of another rank.
std::string refusal_of_gpus(const std::vector<RankFacts>& ranks) {
  const bool may_share =
      std::all_of(ranks.begin(), ranks.end(), [](const RankFacts& f) { return f.may_share_gpu; });
  for (size_t a = 0; a < ranks.size() && !may_share; ++a) {
    for (size_t b = a + 1; b < ranks.size(); ++b) {
      if (ranks[a].gpu == ranks[b].gpu)
        return ranks_text({a, b}) + " are on one GPU, " + ranks[a].gpu + ", which " + kMayShareGpu +
               "=1 on every rank allows";
    }
  }
  for (size_t a = 0; a < ranks.size(); ++a) {
    for (size_t b = 0; b < ranks.size(); ++b) {
      if (contains(ranks[a].visible, ranks[b].gpu) && !contains(ranks[a].reachable, ranks[b].gpu))
        return "the GPU of rank " + std::to_string(a) + " cannot access the memory of the GPU of rank " +
               std::to_string(b);
    }
  }
  return "";
}

}  // namespace

std::string RankFacts::text() const {
  std::string lines;
  for (const std::string& line :
       {refusal, std::to_string(number), std::to_string(bytes), host, boot, folder, gpu, join(visible),
        join(reachable), std::string(may_share_gpu ? "1" : "0")}) {
    lines += one_line(line) + "\n";
  }
  return lines;
}

RankFacts RankFacts::parse(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines(10);
  for (std::string& line : lines) std::getline(stream, line);
  const auto number = [](const std::string& line) { return std::strtoll(line.c_str(), nullptr, 10); };
  return {lines[0], number(lines[1]), number(lines[2]), lines[3],        lines[4],
          lines[5], lines[6],         split(lines[7]),  split(lines[8]), lines[9] == "1"};
}

void add_host_facts(RankFacts& facts) {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) == 0) facts.host = name;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> facts.boot;
  // torch passes memory between processes as file descriptors, through a socket "<folder>/symm_mem-<pid>". It does not check that
  // the path fits into the address of a socket.
  const std::string folder = std::filesystem::temp_directory_path().string();
  if (folder.size() + std::string("/symm_mem-").size() + std::to_string(getpid()).size() >=
      kSocketPathLength) {
    facts.refusal = "the path of the folder of temporary files is too long for sockets: " + folder;
    return;
  }
  struct stat found {};
  if (stat(folder.c_str(), &found) == 0)
    facts.folder = std::to_string(found.st_dev) + ":" + std::to_string(found.st_ino);
}

std::string values_by_rank(const std::vector<std::string>& values) {
  std::vector<std::string> seen;
  std::string text;
  for (const std::string& value : values) {
    if (contains(seen, value)) continue;
    seen.push_back(value);
    std::vector<size_t> ranks;
    for (size_t rank = 0; rank < values.size(); ++rank) {
      if (values[rank] == value) ranks.push_back(rank);
    }
    text += (text.empty() ? "" : "; ") + value + " on " + ranks_text(ranks);
  }
  return text;
}

std::string merge_reports(const std::vector<std::string>& reports) {
  if (!differ(reports)) return reports.front();
  std::string text;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].empty())
      text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + reports[rank];
  }
  return text;
}

std::string refusal_of(const std::vector<RankFacts>& ranks) {
  const std::string refused = merge_reports(each(ranks, [](const RankFacts& f) { return f.refusal; }));
  if (!refused.empty()) return refused;
  const auto sizes = each(ranks, [](const RankFacts& f) { return std::to_string(f.bytes) + " bytes"; });
  if (differ(sizes)) return "the ranks ask for different sizes: " + values_by_rank(sizes);
  if (differ(each(ranks, [](const RankFacts& f) { return f.host + " " + f.boot; })))
    return "the ranks are on different hosts: " +
           values_by_rank(each(ranks, [](const RankFacts& f) { return f.host; }));
  const auto folders = each(ranks, [](const RankFacts& f) { return f.folder; });
  if (differ(folders))
    return "the ranks have different folders of temporary files, through which they would pass memory: " +
           values_by_rank(folders);
  return refusal_of_gpus(ranks);
}

}  // namespace transformer_plugin::distributed
