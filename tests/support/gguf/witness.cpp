// Asks llama.cpp about a gguf file. tests/support/gguf/witness.py runs it.
//
//   witness ids FILE < TEXT
//       prints a line of the tokens of a text, and a line of the tokens that end an answer
//   witness logits FILE COUNT < TOKENS
//       writes COUNT rows of logits as float32: after the prompt, then after each greedy token
//   witness expand FILE COPY
//       writes a copy of the file with all matrices as float32
#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

static void print(const std::vector<llama_token> & tokens) {
    for (llama_token token : tokens) std::cout << token << ' ';
    std::cout << '\n';
}

static void ids(const llama_vocab * vocab) {
    const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
    std::vector<llama_token> tokens(text.size() + 16), ends;  // a token has at least a byte; spaces may be added
    const bool starts = false, has_special = true;
    const int count = llama_tokenize(
        vocab, text.data(), text.size(), tokens.data(), tokens.size(), starts, has_special);
    if (count < 0) throw std::runtime_error("the text has more tokens than bytes");
    tokens.resize(count);
    print(tokens);
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); token++)
        if (llama_vocab_is_eog(vocab, token)) ends.push_back(token);
    print(ends);
}

static void logits(llama_model * model, int count) {
    std::vector<llama_token> next{std::istream_iterator<llama_token>(std::cin), {}};
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = next.size() + count;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) throw std::runtime_error("llama.cpp makes no context");
    const int size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    while (count--) {
        if (llama_decode(context, llama_batch_get_one(next.data(), next.size())))
            throw std::runtime_error("llama.cpp does not compute");
        const float * row = llama_get_logits_ith(context, -1);
        std::fwrite(row, sizeof(float), size, stdout);
        next = {llama_token(std::max_element(row, row + size) - row)};
    }
}

static void expand(const char * file, const char * copy) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    params.nthread = 1;
    if (llama_model_quantize(file, copy, &params)) throw std::runtime_error("llama.cpp writes no copy");
}

int main(int argc, char ** argv) try {
    const std::string what = argc > 2 ? argv[1] : "";
    if (what != "ids" && ((what != "logits" && what != "expand") || argc != 4))
        throw std::runtime_error("witness ids FILE, witness logits FILE COUNT, or witness expand FILE COPY");
    llama_backend_init();
    if (what == "expand") {
        expand(argv[2], argv[3]);
        return 0;
    }
    llama_model_params params = llama_model_default_params();
    params.vocab_only = what == "ids";
    llama_model * model = llama_model_load_from_file(argv[2], params);
    if (!model) throw std::runtime_error("llama.cpp does not load the file");
    if (what == "ids") ids(llama_model_get_vocab(model));
    else logits(model, std::stoi(argv[3]));
} catch (const std::exception & error) {
    std::cerr << error.what() << '\n';
    return 1;
}
